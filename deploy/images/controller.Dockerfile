# The operator: Python and a Kubernetes client; no torch, no Ray.
# Debian with Python 3.11 or newer as `python`, with its venv.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE} AS build
WORKDIR /src
RUN python -m venv /opt/baton
COPY . .
RUN /opt/baton/bin/pip install --no-cache-dir '.[controller]'

FROM ${BASE}
RUN useradd --uid 1000 --user-group --no-create-home --shell /usr/sbin/nologin baton
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
HEALTHCHECK NONE
ENTRYPOINT ["python", "-m", "deploy.controller"]
