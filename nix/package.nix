# The entrypoint over an environment: small, so that a change of ours rebuilds seconds and not gigabytes.
{
  lib,
  runCommand,
  runtimeShell,
  coreutils,
  stdenv,
}:
{ environment, cuda }:
let
  written = builtins.readFile ../entrypoint/__init__.py;
  version = builtins.head (builtins.match ".*__version__ = \"([^\"]+)\".*" written);

  # The engine compiles kernels at run time: its host compiler must belong to the C library of the interpreter.
  path = lib.makeBinPath ([ coreutils ] ++ lib.optional (cuda != null) stdenv.cc);
in
runCommand "relaunch-${version}"
  {
    passthru = { inherit environment cuda version; };
    meta = {
      description = "Serve big quantised models with sglang, and keep them served";
      mainProgram = "relaunch";
      platforms = [ "x86_64-linux" ];
    };
  }
  ''
    mkdir -p $out/bin $out/lib
    cp -r ${../entrypoint} $out/lib/entrypoint
    chmod -R u+w $out/lib
    cp -r ${../env} $out/lib/entrypoint/env
    find $out/lib -name __pycache__ -prune -exec rm -rf {} +
    ${environment}/bin/python -m compileall -q --invalidation-mode unchecked-hash $out/lib
    sed -e 's|@shell@|${runtimeShell}|' -e "s|@app@|$out/lib|" -e 's|@python@|${environment}/bin/python|' \
      -e 's|@path@|${path}|' -e 's|@libraries@|${environment.libraries}|' \
      -e 's|@cuda@|${if cuda == null then "" else "${cuda}/home"}|' ${./launch.sh} > $out/bin/relaunch
    chmod 755 $out/bin/relaunch
  ''
