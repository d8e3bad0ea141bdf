# syntax=docker/dockerfile:1
# Images of maxlm, with the root of the repository as their working directory. See docs/containers.md.
#
#   docker build --target cuda12 --tag maxlm:cuda12 .
#
# Targets: cpu, cuda12 and tpu train on this hardware. serve runs the server on the hardware HARDWARE, one of these
# targets. EXTRAS lists the extras of pyproject.toml to install, and UID is the number of the image's user.
ARG HARDWARE=cuda12

FROM python:3.12-slim-trixie AS base
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1
WORKDIR /maxlm

FROM base AS dependencies
ARG EXTRAS=gcs,s3
# uv cannot make hard links from a cache mount. Bytecode is compiled here, because the image's user cannot write it.
ENV VIRTUAL_ENV=/opt/venv \
    UV_LINK_MODE=copy \
    UV_COMPILE_BYTECODE=1
RUN --mount=type=cache,target=/root/.cache/pip pip install uv==0.13.9 && uv venv /opt/venv
# The packages are installed again only if these files change. The editable installation of an empty package refers to
# the directory into which the final stages copy the source.
COPY pyproject.toml setup.py requirements.lock README.md LICENSE ./
RUN mkdir maxlm && touch maxlm/__init__.py

# As a constraint, the lock file fixes the version and the hashes of each package that it contains.
FROM dependencies AS cpu-packages
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --constraint requirements.lock --build-constraint requirements.lock --editable ".[${EXTRAS}]"

FROM dependencies AS cuda12-packages
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --constraint requirements.lock --build-constraint requirements.lock --editable ".[cuda12,${EXTRAS}]"

FROM dependencies AS tpu-packages
RUN --mount=type=cache,target=/root/.cache/uv \
    uv pip install --constraint requirements.lock --build-constraint requirements.lock --editable ".[tpu,${EXTRAS}]"

FROM base AS runtime
ARG UID=1000
# The user's cache contains compiled programs, and is a volume in compose.yaml.
RUN useradd --no-log-init --uid "${UID}" --create-home maxlm && \
    install --directory --owner=maxlm --group=maxlm data runs /home/maxlm/.cache
ENTRYPOINT ["maxlm"]
CMD ["--help"]

FROM runtime AS cpu
COPY --from=cpu-packages /opt/venv /opt/venv
COPY . .
USER ${UID}

FROM runtime AS cuda12
# The container runtime of NVIDIA adds the driver and nvidia-smi. The CUDA libraries are Python packages.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=cuda12-packages /opt/venv /opt/venv
COPY . .
USER ${UID}

FROM runtime AS tpu
COPY --from=tpu-packages /opt/venv /opt/venv
COPY . .
USER ${UID}

# BuildKit builds only the stages that this one needs.
FROM ${HARDWARE} AS serve
EXPOSE 8000
# The server opens its port after it has compiled its programs, which takes minutes for large models.
HEALTHCHECK --interval=30s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["maxlm", "serve", "--host=0.0.0.0", "--port=8000"]
CMD ["--help"]
