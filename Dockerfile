# The container door.
#   docker build -t relaunch:local .                           with the engine, about 11 GB
#   docker build -t relaunch:plain --build-arg VARIANT=plain . without it: plan, doctor, weights, explain, gateway
# No `# syntax=` line: the builder's own frontend does all that is used here, also without a registry.
ARG VARIANT=engine

# Python's own 3.12 image: every CUDA library and the compiler come from the hashed wheels, so a CUDA base
# would only add a second copy that can disagree with them (docs/decisions/container-base.md).
FROM python:3.12-slim@sha256:dddfd7e07f9d15aeeca61529320492139d21cac7f0070c00609243e51e4e0016 AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PATH=/opt/relaunch/bin:/opt/relaunch/venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin

# uv by hash from the dev lock. It builds the environments and is not part of the image.
FROM base AS tools
RUN --mount=type=bind,source=locks/dev.txt,target=/tmp/dev.txt \
    sed -n '/^uv==/,/[^\\]$/p' /tmp/dev.txt > /tmp/uv.txt \
    && python3 -m pip install --no-cache-dir --root-user-action=ignore --disable-pip-version-check \
        --require-hashes --no-deps --target /opt/tools -r /tmp/uv.txt

FROM base AS plain
# tini is pid 1: it forwards signals and reaps what `docker exec` and a killed supervisor leave behind, also where
# no `init: true` exists (Podman, Kubernetes). The supervisor beneath it is a subreaper for its own tree.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* /var/log/* /var/cache/*/*
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    --mount=type=bind,source=locks/runtime.txt,target=/tmp/lock.txt \
    python3 -m venv --without-pip /opt/relaunch/venv \
    && /opt/tools/bin/uv pip install --python /opt/relaunch/venv/bin/python --no-cache \
        --require-hashes --no-deps --compile-bytecode -r /tmp/lock.txt \
    && echo /opt/relaunch/app > /opt/relaunch/venv/lib/python3.12/site-packages/relaunch.pth \
    && mkdir /opt/relaunch/locks && cp /tmp/lock.txt /opt/relaunch/locks/runtime.txt

FROM base AS engine
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# g++: FlashInfer, sglang and Triton compile kernels at run time. libnuma1: the engine binds ranks to NUMA nodes.
# Versions are not pinned: Debian removes superseded ones from its mirrors, and a pin would break the build with
# the next security fix. What was installed stands in the SBOM.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/* /var/log/* /var/cache/*/*
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    --mount=type=bind,source=locks/engine.txt,target=/tmp/lock.txt \
    python3 -m venv --without-pip /opt/relaunch/venv \
    && /opt/tools/bin/uv pip install --python /opt/relaunch/venv/bin/python --no-cache \
        --require-hashes --no-deps --compile-bytecode -r /tmp/lock.txt \
    && echo /opt/relaunch/app > /opt/relaunch/venv/lib/python3.12/site-packages/relaunch.pth \
    && mkdir /opt/relaunch/locks && cp /tmp/lock.txt /opt/relaunch/locks/engine.txt
# The wheels' compiler and headers in the layout that FlashInfer expects, and a look into every installed binary:
# is there code for this GPU, and do nvcc and the headers agree? A change elsewhere in entrypoint/ repeats neither.
ARG SM=120
RUN --mount=type=bind,source=entrypoint/kernels,target=/tmp/build/relaunch_kernels \
    PYTHONPATH=/tmp/build /opt/relaunch/venv/bin/python -m relaunch_kernels.cuda_home /opt/relaunch/cuda \
    && CUDA_HOME=/opt/relaunch/cuda PYTHONPATH=/tmp/build PYTHONDONTWRITEBYTECODE=1 \
        /opt/relaunch/venv/bin/python -m relaunch_kernels.binaries "${SM}" "/opt/relaunch/binaries-sm${SM}.json"
ENV CUDA_HOME=/opt/relaunch/cuda
# Kernels compiled ahead: WARM=all or names of `relaunch warm` (minutes to an hour of compilers). They are copied
# into the cache volume at the first start.
ARG WARM=
ARG WARM_JOBS=
RUN --mount=type=bind,source=entrypoint/kernels,target=/tmp/build/relaunch_kernels \
    if [ -n "${WARM}" ]; then \
        PYTHONPATH=/tmp/build PYTHONDONTWRITEBYTECODE=1 /opt/relaunch/venv/bin/python -m relaunch_kernels.precompile \
            "${SM}" /var/cache/relaunch /opt/relaunch/warm "${WARM}" ${WARM_JOBS:+"${WARM_JOBS}"}; \
    fi

# What is inside, readable without starting it; a test holds these to locks/engine.txt.
LABEL relaunch.engine.sglang="0.5.23" \
      relaunch.engine.torch="2.14.1" \
      relaunch.engine.flashinfer-python="0.7.2" \
      relaunch.lock="sha256:6e50067f6438aacbc99b7fd7cb43bd265e4d6288bc2f798cd072ca6a279f1ab0"

# hadolint ignore=DL3006
FROM ${VARIANT} AS image
# The gateway's router, beside either: about 90 MB, and 15 MB that the plain image lacks.
RUN --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    --mount=type=bind,source=locks/gateway.txt,target=/tmp/lock.txt \
    /opt/tools/bin/uv pip install --python /opt/relaunch/venv/bin/python --no-cache \
        --require-hashes --no-deps --compile-bytecode -r /tmp/lock.txt \
    && cp /tmp/lock.txt /opt/relaunch/locks/gateway.txt
# Any uid may run this: HOME is the cache volume, and what the volumes start from is writable by all.
RUN mkdir -p /var/lib/relaunch /var/cache/relaunch /var/cache/huggingface \
    && chmod 1777 /var/lib/relaunch /var/cache/relaunch /var/cache/huggingface
ENV HOME=/var/cache/relaunch \
    USER=relaunch \
    HF_HOME=/var/cache/huggingface \
    RELAUNCH_STATE_DIR=/var/lib/relaunch \
    RELAUNCH_CACHE_DIR=/var/cache/relaunch \
    RELAUNCH_HOST=0.0.0.0 \
    RELAUNCH_CONTROL_HOST=0.0.0.0 \
    RELAUNCH_ON_GIVE_UP=hold \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY deploy/container/relaunch deploy/container/healthy /opt/relaunch/bin/
COPY entrypoint /opt/relaunch/app/entrypoint
COPY env /opt/relaunch/app/entrypoint/env
# Byte-code that depends on neither file times nor a random hash seed: two builds give the same bytes.
RUN --mount=type=bind,source=scripts/sbom.py,target=/tmp/sbom.py \
    PYTHONHASHSEED=0 python3 -m compileall -q --invalidation-mode unchecked-hash /opt/relaunch/app \
    && /opt/relaunch/venv/bin/python -P /tmp/sbom.py --locks /opt/relaunch/locks --output /opt/relaunch/sbom.cdx.json

ARG VERSION=0.1.0
ARG REVISION=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="relaunch" \
      org.opencontainers.image.description="Serve a big model with sglang: plan the memory, prove the weights, name the crash, bring it back" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="docker.io/library/python:3.12-slim" \
      org.opencontainers.image.base.digest="sha256:dddfd7e07f9d15aeeca61529320492139d21cac7f0070c00609243e51e4e0016"

USER 10001:0
WORKDIR /var/lib/relaunch
EXPOSE 30000 30001
STOPSIGNAL SIGTERM
# The start period covers STARTUP_TIMEOUT: loading and compiling are not illness.
HEALTHCHECK --interval=10s --timeout=5s --start-period=65m --retries=3 CMD ["/opt/relaunch/bin/healthy"]
ENTRYPOINT ["tini", "--", "relaunch"]
CMD ["serve"]
