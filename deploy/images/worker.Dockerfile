# Workers, and the head of the Ray cluster that they are part of.
ARG PYTHON=3.12-slim-bookworm
FROM python:${PYTHON} AS build
# https://download.pytorch.org/whl/cpu: without CUDA, several gigabytes less.
ARG TORCH_INDEX=https://pypi.org/simple
ARG TORCH_VERSION=2.13.0
# The chart's images.rayVersion.
ARG RAY_VERSION=2.60.0
WORKDIR /src
RUN python -m venv /opt/baton \
    && /opt/baton/bin/pip install --no-cache-dir \
        --index-url "${TORCH_INDEX}" "torch==${TORCH_VERSION}" \
    && echo "ray==${RAY_VERSION}" > /opt/constraints.txt
COPY . .
RUN /opt/baton/bin/pip install --no-cache-dir --constraint /opt/constraints.txt '.[pods]'

FROM python:${PYTHON}
# A compiler: native code is built for the machine that it runs on. UCX with RDMA, which the wheel
# lacks (transfer.ucxLibrary: system). wget: KubeRay's probes.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        g++ ibverbs-providers libibverbs1 librdmacm1 libucx0 wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --user-group --create-home --shell /usr/sbin/nologin baton \
    && install --directory --owner=1000 --group=1000 /var/run/baton /var/cache/baton/weights
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
HEALTHCHECK NONE
CMD ["python", "-m", "cluster.head"]
