# The images by name: `docker buildx bake engine`, `plain`, `warm` (the engine with its kernels compiled ahead).
#   VERSION=0.1.0 REVISION=$(git rev-parse HEAD) docker buildx bake engine
#   ATTEST=true docker buildx bake --push engine      with SBOM and provenance, which need a registry or the containerd store

variable "NAME" {
  default = "relaunch"
}
variable "VERSION" {
  default = "0.1.0"
}
variable "REVISION" {
  default = "unknown"
}
variable "SOURCE" {
  default = "unknown"
}
variable "DEBIAN_MIRROR" {
  default = ""
}
variable "WARM_JOBS" {
  default = ""
}
variable "ATTEST" {
  default = false
}

group "default" {
  targets = ["engine"]
}

target "_image" {
  context = "."
  args = {
    VERSION       = VERSION
    REVISION      = REVISION
    SOURCE        = SOURCE
    DEBIAN_MIRROR = DEBIAN_MIRROR
  }
  attest = ATTEST ? ["type=sbom", "type=provenance,mode=max"] : []
}

target "engine" {
  inherits = ["_image"]
  args     = { VARIANT = "engine" }
  tags     = ["${NAME}:local", "${NAME}:${VERSION}"]
}

target "plain" {
  inherits = ["_image"]
  args     = { VARIANT = "plain" }
  tags     = ["${NAME}:plain", "${NAME}:${VERSION}-plain"]
}

target "warm" {
  inherits = ["engine"]
  args = {
    WARM      = "all"
    WARM_JOBS = WARM_JOBS
  }
  tags = ["${NAME}:warm", "${NAME}:${VERSION}-warm"]
}
