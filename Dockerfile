# Images of Decant's processes. Targets, smallest first:
#
#   router         no torch, no UCX
#   node-cpu       prefill and decode nodes on CPUs; also converts the default model and draws keys
#   node-gpu       the same with a CUDA build of torch
#   node-gpu-rdma  node-gpu with a UCX built with verbs, from a source archive (docs/rdma.md)
#
# BuildKit and the classic builder both build it. The classic one makes every stage above the target, so their order matters.
# Versions of Python packages are exact (requirements*.lock). Pin the base by digest where you keep one:
#   docker build --build-arg BASE_IMAGE=debian@sha256:... --target router .

ARG BASE_IMAGE=debian:bookworm-slim
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu22.04

# --- what every image stands on: Debian's Python, and a user that owns nothing but its cache

FROM ${BASE_IMAGE} AS python
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
    && useradd --uid 10001 --user-group --home-dir /var/cache/decant --create-home --shell /usr/sbin/nologin decant \
    && install -d -o decant -g decant -m 0755 /var/lib/decant \
    && install -d -o decant -g decant -m 0700 /etc/decant/keys
ENV PATH=/opt/decant/bin:/opt/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONPATH=/opt/decant \
    PYTHONUNBUFFERED=1 \
    DECANT_CACHE=/var/cache/decant
COPY deploy/healthcheck.py /usr/local/bin/healthcheck

# --- where packages are installed and Decant's own code is built (PIP_* arguments: a mirror, or a folder of wheels)

FROM python AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends binutils gcc libc6-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* \
    && python3 -m venv /opt/venv
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore

FROM build AS app
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_TRUSTED_HOST
COPY . /src
RUN pip install -q --no-deps --target /opt/decant /src

# tokenizers asks for a hub client that a router has no use for: --no-deps. Some wheels carry debug symbols: strip.
FROM build AS router-packages
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_TRUSTED_HOST
COPY requirements-router.lock /tmp/
RUN pip install -q --no-deps -r /tmp/requirements-router.lock \
    && find /opt/venv -name '*.so' -exec strip --strip-unneeded {} + \
    && python3 -m pip uninstall -q -y setuptools pip

# --- the images

FROM python AS router
COPY --from=router-packages /opt/venv /opt/venv
COPY --from=app /opt/decant /opt/decant
RUN python3 -c "import router.main"
USER decant
ENTRYPOINT ["decant"]
CMD ["router"]

# A compiler stays in: what drives UCX, and attention on CPUs, are compiled where they run. So does pip, which fetches the default model.
FROM build AS node-cpu
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_TRUSTED_HOST
ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY requirements.lock deploy/install_torch.sh /tmp/
RUN pip install -q --no-deps -r /tmp/requirements.lock \
    && /tmp/install_torch.sh /opt/venv/bin/python cpu "${TORCH_VERSION}" "${TORCH_INDEX}" \
    && find /opt/venv -name '*.a' -delete \
    && rm -rf /opt/venv/lib/python3*/site-packages/torch/include
COPY --from=app /opt/decant /opt/decant
RUN python3 -c "import decode_node.main, prefill_node.main, router.main"
USER decant
ENTRYPOINT ["decant"]
CMD ["--help"]

# Triton compiles its kernels with the compiler that stays in. FlashInfer, which is in no lock, compiles its own with nvcc, so an
# image with it stands on another base (Ubuntu 24.04 has Python 3.12):
#   docker build --target node-gpu --build-arg BASE_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04 \
#     --build-arg EXTRA_PACKAGES="flashinfer-python==0.6.14 apache-tvm-ffi==0.1.10" .
FROM build AS node-gpu
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_TRUSTED_HOST
ARG TORCH_VERSION=2.13.0
ARG EXTRA_PACKAGES=
COPY requirements.lock deploy/install_torch.sh /tmp/
RUN pip install -q --no-deps -r /tmp/requirements.lock \
    && /tmp/install_torch.sh /opt/venv/bin/python cuda "${TORCH_VERSION}" unused \
    && if [ -n "${EXTRA_PACKAGES}" ]; then pip install -q --no-deps ${EXTRA_PACKAGES}; fi
COPY --from=app /opt/decant /opt/decant
ENV PATH=/opt/decant/bin:/opt/venv/bin:/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER decant
ENTRYPOINT ["decant"]
CMD ["--help"]

# UCX with verbs: docker build --target node-gpu-rdma --build-arg UCX_ARCHIVE=ucx-1.21.0.tar.gz --build-arg UCX_SHA256=... .
# The archive is UCX's own release archive, laid into this folder; nothing is fetched.
FROM ${CUDA_IMAGE} AS ucx
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential libibverbs-dev librdmacm-dev \
    && rm -rf /var/lib/apt/lists/*
ARG UCX_ARCHIVE
ARG UCX_SHA256
COPY ${UCX_ARCHIVE} /tmp/ucx.tar.gz
RUN echo "${UCX_SHA256}  /tmp/ucx.tar.gz" | sha256sum --check \
    && mkdir /tmp/ucx && tar -xzf /tmp/ucx.tar.gz -C /tmp/ucx --strip-components=1 \
    && cd /tmp/ucx \
    && ./contrib/configure-release --prefix=/opt/ucx --enable-mt --with-verbs --with-rdmacm --with-cuda=/usr/local/cuda \
        --without-java --without-go --without-rocm --disable-static \
    && make -j"$(nproc)" install \
    && /opt/ucx/bin/ucx_info -b | grep -q '^#define HAVE_IB '

FROM node-gpu AS node-gpu-rdma
USER root
RUN apt-get update \
    && apt-get install -y --no-install-recommends ibverbs-providers libibverbs1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
COPY --from=ucx /opt/ucx /opt/ucx
RUN echo /opt/ucx/lib > /etc/ld.so.conf.d/ucx.conf && ldconfig
ENV RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true
USER decant
