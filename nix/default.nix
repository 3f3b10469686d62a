# Everything that the flake offers, from one nixpkgs.
{ pkgs }:
let
  environment = pkgs.callPackage ./environment.nix { };
  package = pkgs.callPackage ./package.nix { };

  runtime = environment {
    name = "relaunch-runtime";
    locks = [ ../locks/runtime.txt ];
    imports = [
      "pydantic"
      "uvloop"
    ];
  };

  router = environment {
    name = "relaunch-router";
    locks = [ ../locks/gateway.txt ];
    imports = [
      "smg.router"
      "uvloop"
    ];
  };

  engine = environment {
    name = "relaunch-engine";
    locks = [ ../locks/engine.txt ];
    # Without a driver here: what loads libcuda itself is not in this list.
    imports = [
      "torch"
      "flashinfer"
      "sglang.srt.server_args"
      "uvloop"
    ];
  };
in
rec {
  inherit runtime engine;

  # For the checks and the shell.
  development = environment {
    name = "relaunch-development";
    locks = [ ../locks/dev.txt ];
    imports = [
      "pytest"
      "hypothesis"
    ];
  };

  plain = package {
    environment = runtime;
    cuda = null;
  };

  gateway = package {
    environment = router;
    cuda = null;
  };

  complete = package {
    environment = engine;
    cuda = pkgs.callPackage ./cuda.nix { inherit engine; };
  };

  # A program without arguments of its own, as `nix run` starts it. Serve hands over to another verb if one is given,
  # so that `nix run . -- doctor` works too.
  verb =
    name: relaunch:
    pkgs.writeShellScriptBin "relaunch-${name}" (
      if name == "serve" then
        ''exec ${relaunch}/bin/relaunch "''${@:-serve}"''
      else
        ''exec ${relaunch}/bin/relaunch ${name} "$@"''
    );

  image = pkgs.callPackage ./image.nix { relaunch = complete; };
}
