# A stand-in for nixpkgs in tests: just the calls that our flake makes, answered with this machine's own programs.
# `here.json`, written by the test, says where those are and where each wheel lies.
{
  outputs =
    { self }:
    let
      pkgs = import ./pkgs.nix;
    in
    {
      lib = pkgs.lib // {
        nixosSystem = import (if pkgs.realLib then ./modules.nix else ./nixos.nix) pkgs;
      };
      legacyPackages.x86_64-linux = pkgs;
    };
}
