# The container image.
#   docker build -t relaunch:local .                           with the engine, about 11 GB
#   docker build -t relaunch:plain --build-arg VARIANT=plain . without it: plan, doctor, weights, explain, gateway
#   docker buildx bake engine plain warm                       all of them with their names (docker-bake.hcl)
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
COPY deploy/container/install /opt/tools/install

# Debian's packages, once for either variant. tini is pid 1: it forwards signals and reaps what `docker exec` and a killed
# supervisor leave behind, also where no `init: true` exists (Podman, Kubernetes). g++: FlashInfer, sglang and Triton
# compile kernels at run time. libnuma1: the engine binds ranks to NUMA nodes.
# Versions are not pinned: Debian removes superseded ones from its mirrors, and a pin would break the build with the next
# security fix. DEBIAN_MIRROR names another mirror, or the same one as it was on a day (a snapshot archive keeps every
# day under an address of its own): then two builds install the same versions. What was installed stands in the SBOM.
FROM base AS system
ARG VARIANT
ARG DEBIAN_MIRROR=
# hadolint ignore=DL3008,SC2086,SC1091
RUN if [ -n "${DEBIAN_MIRROR}" ]; then \
        rm -rf /etc/apt/sources.list /etc/apt/sources.list.d \
        && . /etc/os-release \
        && echo "deb [check-valid-until=no] ${DEBIAN_MIRROR} ${VERSION_CODENAME} main" > /etc/apt/sources.list; \
    fi \
    && packages=tini \
    && if [ "${VARIANT}" = engine ]; then packages="tini g++ libnuma1"; fi \
    && apt-get update \
    && apt-get install -y --no-install-recommends ${packages} \
    && rm -rf /var/lib/apt/lists/* /var/log/* /var/cache/*/* \
    && python3 -m venv --without-pip /opt/relaunch/venv \
    && echo /opt/relaunch/app > /opt/relaunch/venv/lib/python3.12/site-packages/relaunch.pth \
    && mkdir /opt/relaunch/locks

# Packages come through a cache of the builder's: a changed lock downloads what changed.
FROM system AS plain
RUN --mount=type=cache,target=/tmp/uv \
    --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    --mount=type=bind,source=locks/runtime.txt,target=/tmp/lock.txt \
    /opt/tools/install /tmp/lock.txt \
    && cp /tmp/lock.txt /opt/relaunch/locks/runtime.txt

# The engine's lock in the order of how seldom its parts change, a layer each: CUDA's libraries, torch with what is built
# against it, everything else, and at last the engine with its kernels. A new engine rebuilds and moves the last layer
# (2 GB of 9.5), and pulls fetch all four side by side.
FROM base AS parts
RUN --mount=type=bind,source=locks/engine.txt,target=/tmp/lock.txt \
    awk 'BEGIN { part = "rest" } \
        /^[a-z0-9]/ { part = "rest" } \
        /^nvidia-(cu[^t]|nccl|nv)/ { part = "cuda" } \
        /^(torch|torch[a-z]+|triton)==/ { part = "torch" } \
        /^(sglang|sgl-|flashinfer|nvidia-cutlass)/ { part = "engine" } \
        { print > ("/tmp/" part ".txt") }' /tmp/lock.txt

FROM system AS engine
RUN --mount=type=cache,target=/tmp/uv \
    --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    --mount=type=bind,from=parts,source=/tmp/cuda.txt,target=/tmp/cuda.txt \
    /opt/tools/install /tmp/cuda.txt
RUN --mount=type=cache,target=/tmp/uv \
    --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    --mount=type=bind,from=parts,source=/tmp/torch.txt,target=/tmp/torch.txt \
    /opt/tools/install /tmp/torch.txt
RUN --mount=type=cache,target=/tmp/uv \
    --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    --mount=type=bind,from=parts,source=/tmp/rest.txt,target=/tmp/rest.txt \
    /opt/tools/install /tmp/rest.txt
RUN --mount=type=cache,target=/tmp/uv \
    --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    --mount=type=bind,from=parts,source=/tmp/engine.txt,target=/tmp/engine.txt \
    --mount=type=bind,source=locks/engine.txt,target=/tmp/lock.txt \
    /opt/tools/install /tmp/engine.txt \
    && cp /tmp/lock.txt /opt/relaunch/locks/engine.txt
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

# What is inside, readable without starting it; a test holds the defaults to locks/engine.txt.
ARG SGLANG=0.5.23
ARG TORCH=2.14.1
ARG FLASHINFER=0.7.2
ARG LOCK=sha256:5881e0028b3df8b73d880c07b4f41833285f7e890677b408167a63a9fa506c0d
LABEL relaunch.engine.sglang="${SGLANG}" \
      relaunch.engine.torch="${TORCH}" \
      relaunch.engine.flashinfer-python="${FLASHINFER}" \
      relaunch.lock="${LOCK}"

# hadolint ignore=DL3006
FROM ${VARIANT} AS image
# The gateway's router, beside either: about 105 MB, and 20 MB that the plain image lacks.
RUN --mount=type=cache,target=/tmp/uv \
    --mount=type=bind,from=tools,source=/opt/tools,target=/opt/tools \
    --mount=type=bind,source=locks/gateway.txt,target=/tmp/lock.txt \
    /opt/tools/install /tmp/lock.txt \
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
