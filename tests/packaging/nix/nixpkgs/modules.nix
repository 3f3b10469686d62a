# lib.nixosSystem over the real lib of nixpkgs: its evalModules, option types and merging. Declared here are only the
# options of NixOS that our module defines; what NixOS makes of them is `unit-text.nix`.
pkgs:
{ modules }:
let
  inherit (pkgs) lib;
  inherit (lib) mkOption types;

  declared.options = {
    assertions = mkOption {
      type = types.listOf types.unspecified;
      default = [ ];
    };
    boot.isContainer = mkOption { type = types.bool; };
    networking.firewall.allowedTCPPorts = mkOption {
      type = types.listOf types.port;
      default = [ ];
    };
    nixpkgs.hostPlatform = mkOption { type = types.str; };
    system.stateVersion = mkOption { type = types.str; };
    systemd.services = mkOption {
      default = { };
      type = types.attrsOf (
        types.submodule {
          options = {
            description = mkOption { type = types.singleLineStr; };
            environment = mkOption { type = types.attrsOf types.str; };
            serviceConfig = mkOption {
              # nixos/lib/systemd-unit-options.nix: unitOption.
              type =
                let
                  one = types.oneOf [
                    types.bool
                    types.int
                    types.float
                    types.str
                    types.path
                    types.package
                  ];
                in
                types.attrsOf (types.either one (types.listOf one));
            };
          }
          // lib.genAttrs [ "after" "wants" "wantedBy" ] (_: mkOption { type = types.listOf types.str; });
        }
      );
    };
  };

  evaluated = lib.evalModules {
    modules = [ declared ] ++ modules;
    specialArgs = { inherit pkgs; };
  };
  inherit (evaluated) config;
in
evaluated
// {
  config = config // {
    systemd = config.systemd // {
      units = lib.mapAttrs' (
        name: service: lib.nameValuePair "${name}.service" { text = import ./unit-text.nix lib service; }
      ) config.systemd.services;
    };
  };
}
