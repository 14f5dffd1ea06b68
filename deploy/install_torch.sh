#!/usr/bin/env bash
# Install the build of torch that this machine needs.
# usage: install_torch.sh PYTHON auto|cpu|cuda VERSION CPU_INDEX
#
# torch is in no lock file: which build is right depends on the machine, and PyPI's own one brings gigabytes of CUDA.
set -euo pipefail
python=$1 build=$2 version=$3 cpu_index=$4
install=("$python" -m pip install -qq --disable-pip-version-check)

case $build in
  auto) if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then build=cuda; else build=cpu; fi ;;
  cpu | cuda) ;;
  *) echo "TORCH=$build: must be auto, cpu or cuda" >&2; exit 2 ;;
esac

installed=$("$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true)
case $build:$installed in
  cpu:"$version"+cpu) exit 0 ;;
  cuda:"$version" | cuda:"$version"+cu*) exit 0 ;;
esac

if [ "$build" = cuda ]; then
  echo "downloading torch $version with CUDA: about 3 GB (TORCH=cpu takes a build of 0.2 GB without it)"
  "${install[@]}" "torch==$version"
elif "${install[@]}" --no-index --no-deps "torch==$version+cpu" 2>/dev/null; then
  "${install[@]}" "torch==$version" # its dependencies
else
  echo "downloading torch $version for CPUs from $cpu_index"
  "${install[@]}" --index-url "$cpu_index" "torch==$version"
fi
