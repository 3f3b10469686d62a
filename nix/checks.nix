# `nix flake check`: none of these needs a GPU, a network or the engine.
{
  pkgs,
  ours,
  nixpkgs,
  nixosModules,
}:
let
  inherit (pkgs) lib runCommand;

  source = runCommand "relaunch-source" { } ''
    mkdir $out
    cp -r ${../entrypoint} $out/entrypoint
    cp -r ${../env} $out/env
    cp -r ${../locks} $out/locks
    cp -r ${../scripts} $out/scripts
    cp -r ${../tests} $out/tests
    cp ${../pyproject.toml} $out/pyproject.toml
  '';

  evaluated = nixpkgs.lib.nixosSystem {
    modules = [
      nixosModules.default
      {
        nixpkgs.hostPlatform = "x86_64-linux";
        system.stateVersion = "26.05";
        boot.isContainer = true;
        services.relaunch = {
          enable = true;
          # The unit alone is looked at: no reason to fetch the engine.
          package = ours.plain;
          openFirewall = true;
          settings = {
            preset = "glm-5-nvfp4";
            port = 8000;
            canary = false;
            drain_timeout = "5m";
            engine_args = "--log-level info --note 100%";
          };
          secrets.api_key = "/run/keys/relaunch-api-key";
          secrets.hf_token = "/run/keys/hf-token";
          environment.NCCL_P2P_LEVEL = "SYS";
          gateway = {
            enable = true;
            package = ours.plain;
            openFirewall = true;
            settings = {
              replicas = "box-1,box-2";
              port = 9000;
            };
            secrets.api_key = "/run/keys/relaunch-api-key";
          };
        };
      }
    ];
  };
  unit = evaluated.config.systemd.units."relaunch.service".text;
  gateway = evaluated.config.systemd.units."relaunch-gateway.service".text;
  # Messages of what the module refuses.
  refused = map (found: found.message) (
    builtins.filter (found: !found.assertion) evaluated.config.assertions
  );
  ports = toString evaluated.config.networking.firewall.allowedTCPPorts;

  expressions = builtins.filter (file: lib.hasSuffix ".nix" (toString file)) (
    [ ../flake.nix ] ++ lib.filesystem.listFilesRecursive ./.
  );
in
{
  # The rooms without clock, file and process.
  rooms = runCommand "relaunch-rooms" { } ''
    cp -r ${source} source
    chmod -R u+w source
    cd source
    export HOME=$TMPDIR PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$PWD
    ${ours.development}/bin/python -P -m pytest -q -p no:cacheprovider -m "not engine and not packaging" \
      tests/plan tests/healing tests/config | tee $out
  '';

  # The command that this door would start is the one that the sources say, for a GPU box and for the rehearsal.
  argv = runCommand "relaunch-argv" { } ''
    export HOME=$TMPDIR PYTHONDONTWRITEBYTECODE=1
    ${ours.development}/bin/python -P ${./argv.py} ${source} ${ours.plain}/bin/relaunch > $out
  '';

  # The module evaluates; the units say what must not be lost.
  module =
    runCommand "relaunch-module"
      {
        inherit unit gateway;
        refused = lib.concatStringsSep "\n" refused;
        passAsFile = [
          "unit"
          "gateway"
        ];
      }
      ''
        [ -z "$refused" ] || { echo "$refused"; exit 1; }
        mkdir $out
        cp $unitPath $out/relaunch.service
        cp $gatewayPath $out/relaunch-gateway.service
        expect() {
          while read -r line; do
            grep -qxF -- "$line" "$1" || { echo "$1 lacks: $line"; exit 1; }
          done < "$2"
        }
        expect $out/relaunch.service ${./unit.expected}
        expect $out/relaunch-gateway.service ${./gateway.expected}
        for port in 8000 9000; do
          case " ${ports} " in *" $port "*) ;; *) echo "the firewall opens: ${ports}"; exit 1 ;; esac
        done
      '';

  formatting = runCommand "relaunch-formatting" { nativeBuildInputs = [ pkgs.nixfmt ]; } ''
    nixfmt --check ${lib.concatMapStringsSep " " (file: "${file}") expressions}
    touch $out
  '';
}
