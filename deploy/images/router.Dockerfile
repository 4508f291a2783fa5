# The router: text, admission and placement; no torch, no Ray.
ARG PYTHON=3.12-slim-bookworm
FROM python:${PYTHON} AS build
WORKDIR /src
RUN python -m venv /opt/baton
COPY . .
RUN /opt/baton/bin/pip install --no-cache-dir '.[router,s3,traces]'

FROM python:${PYTHON}
# A compiler: the choice of a placement, the prefix index and block hashes are built for the machine that they run on.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --user-group --no-create-home --shell /usr/sbin/nologin baton
COPY --from=build /opt/baton /opt/baton
ENV PATH=/opt/baton/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
HEALTHCHECK NONE
ENTRYPOINT ["python", "-m", "router"]
