# A Python environment of exactly one lock's wheels. The lock itself is installed with --require-hashes, as through the
# other doors; nothing is built from source, nothing is resolved here.
{
  lib,
  fetchPypi,
  runCommand,
  python312,
  uv,
  patchelf,
  stdenv,
  numactl,
  rdma-core,
}:
let
  wheelsOf = import ./wheels.nix { inherit fetchPypi; };

  # What wheels expect of a distribution beside the C library: libstdc++ and libgcc_s; libnuma and libibverbs, which the
  # engine and NCCL open by name where they exist.
  libraries = lib.makeLibraryPath [
    stdenv.cc.cc
    numactl
    rdma-core
  ];
in
{
  name,
  locks,
  imports,
}:
let
  wheels = builtins.concatMap wheelsOf locks;
in
runCommand name
  {
    nativeBuildInputs = [
      python312
      uv
      patchelf
    ];
    passthru = { inherit libraries wheels; };
  }
  ''
    export HOME=$TMPDIR UV_NO_CONFIG=1 UV_OFFLINE=1 UV_PYTHON_DOWNLOADS=never UV_NO_PROGRESS=1
    mkdir wheels
    ${lib.concatMapStringsSep "\n" (wheel: "ln -s ${wheel.src} wheels/${wheel.file}") wheels}
    uv venv --python ${python312}/bin/python3.12 $out
    # The cache lies beside what is installed, so that unpacked files are linked and not written twice. Every file of the
    # store gets the same time, which would make byte-code that is bound to times worthless.
    export UV_CACHE_DIR=$out/.cache PYC_INVALIDATION_MODE=UNCHECKED_HASH
    uv pip install --python $out/bin/python --no-index --find-links wheels --no-deps --require-hashes \
      --link-mode hardlink --compile-bytecode ${lib.concatMapStringsSep " " (lock: "-r ${lock}") locks}
    rm -rf $out/.cache
    python3.12 ${./interpreters.py} $out ${stdenv.cc.bintools.dynamicLinker} ${libraries}
    export LD_LIBRARY_PATH=${libraries} PYTHONDONTWRITEBYTECODE=1
    $out/bin/python -P -c "import ${lib.concatStringsSep ", " imports}"
  ''
