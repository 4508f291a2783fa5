# Workers, and the head of the Ray cluster that they are part of.
# Debian with Python 3.11 or newer as `python`, with its venv.
ARG BASE=python:3.12-slim-bookworm
# ucx-cuda; ucx-none: workers without GPU and RDMA have the wheel's UCX.
ARG UCX=ucx-cuda
# The CUDA that torch's wheel brings (cuda-toolkit 13.0.3): UCX and torch share one libcudart. Its libc
# is no newer than BASE's.
ARG CUDA=13.0.3-devel-ubuntu22.04@sha256:3869b846a8cc495ce11c172d87cfc0da8874b910d14a9810bec6b6182e9ee9f8

# UCX with CUDA and RDMA both: the wheel's has no RDMA, Debian's no CUDA (transfer.ucxLibrary: system).
FROM nvidia/cuda:${CUDA} AS ucx-cuda
# As libucx-cu12 in pyproject.toml, with the checksum of its release.
ARG UCX_VERSION=1.21.0
ARG UCX_SHA256=2374d2fcf3186fbfd5e27633ab153aabaeb6b4f503a88563d2aca67cf51ed2c1
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates curl libibverbs-dev librdmacm-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
RUN curl --fail --location --silent --show-error --output ucx.tar.gz \
        "https://github.com/openucx/ucx/releases/download/v${UCX_VERSION}/ucx-${UCX_VERSION}.tar.gz" \
    && echo "${UCX_SHA256}  ucx.tar.gz" > ucx.sha256 \
    && sha256sum --check --strict ucx.sha256 \
    && tar --extract --gzip --file ucx.tar.gz --strip-components 1 \
    && ./contrib/configure-release --prefix=/usr/local --disable-static --enable-mt \
        --with-cuda=/usr/local/cuda --with-verbs --with-mlx5 --with-rdmacm \
        --without-java --without-go \
    && make --jobs="$(nproc)" \
    && make install DESTDIR=/ucx \
    && find /ucx/usr/local/lib ! -type d ! -name '*.so*' -delete \
    && find /ucx/usr/local/lib -type d -empty -delete \
    && cp LICENSE /ucx/usr/local/lib/ucx/ \
    && cp --no-dereference /usr/local/cuda/lib64/libcudart.so.* /ucx/usr/local/lib/ \
    && test -e /ucx/usr/local/lib/ucx/libuct_cuda.so.0 \
    && test -e /ucx/usr/local/lib/ucx/libuct_ib_mlx5.so.0 \
    && test -e /ucx/usr/local/lib/ucx/libuct_rdmacm.so.0

FROM ${BASE} AS ucx-none
RUN mkdir -p /ucx/usr/local/lib
FROM ${UCX} AS ucx

FROM ${BASE} AS build
# https://download.pytorch.org/whl/cpu: without CUDA, several gigabytes less.
ARG TORCH_INDEX=https://pypi.org/simple
ARG TORCH_VERSION=2.13.0
# The chart's images.rayVersion.
ARG RAY_VERSION=2.60.0
WORKDIR /src
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && python -m venv /opt/baton \
    && /opt/baton/bin/pip install --no-cache-dir \
        --index-url "${TORCH_INDEX}" "torch==${TORCH_VERSION}" \
    && echo "ray==${RAY_VERSION}" > /opt/constraints.txt
COPY . .
RUN /opt/baton/bin/pip install --no-cache-dir --constraint /opt/constraints.txt '.[pods]'
# For common CPUs, beside what is installed: a pod has no compiler.
WORKDIR /
RUN /opt/baton/bin/python -m baton.native_build kv_transfer.block_hash:CHAIN \
        kv_transfer.transports.ucx.native:POST_LOOP engine.kernels.native.recipe:KERNELS

FROM ${BASE}
COPY --from=ucx /ucx/usr/local/lib/ /usr/local/lib/
# What UCX's RDMA needs. wget: KubeRay's probes.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ibverbs-providers libibverbs1 librdmacm1 wget \
    && rm -rf /var/lib/apt/lists/* \
    && ldconfig \
    && useradd --uid 1000 --user-group --create-home --shell /usr/sbin/nologin baton \
    && install --directory --owner=1000 --group=1000 /var/run/baton /var/cache/baton/weights
COPY --from=build /opt/baton /opt/baton
# Of the driver: libcuda, and libnvidia-ml, which UCX asks which GPUs reach each other.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
HEALTHCHECK NONE
CMD ["python", "-m", "cluster.supervisor.head"]
