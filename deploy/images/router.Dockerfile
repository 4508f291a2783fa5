# The router: text, admission and placement; no torch, no Ray.
# Debian with Python 3.11 or newer as `python`, with its venv.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE} AS build
WORKDIR /src
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && python -m venv /opt/baton
COPY . .
RUN /opt/baton/bin/pip install --no-cache-dir '.[router,s3,traces]'
# For common CPUs, beside what is installed: a pod has no compiler.
WORKDIR /
RUN /opt/baton/bin/python -m baton.native_build kv_transfer.block_hash:CHAIN \
        router.placement.choice:CHOICE router.index.prefix_index:INDEX

FROM ${BASE}
RUN useradd --uid 1000 --user-group --no-create-home --shell /usr/sbin/nologin baton
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
HEALTHCHECK NONE
ENTRYPOINT ["python", "-m", "router"]
