{
  description = "Serve big quantised models with sglang: plan the memory, prove the weights, name the crash, bring it back";

  # The only input. Python packages come as the wheels of locks/, hash by hash, through nixpkgs' fetchPypi.
  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixos-26.05";

  outputs =
    { self, nixpkgs }:
    let
      # NVIDIA's wheels that the engine needs exist for this system alone.
      system = "x86_64-linux";
      pkgs = nixpkgs.legacyPackages.${system};
      ours = import ./nix { inherit pkgs; };
      app = verb: package: {
        type = "app";
        program = "${ours.verb verb package}/bin/relaunch-${verb}";
        meta.description = "relaunch ${verb}";
      };
    in
    {
      packages.${system} = {
        # The entrypoint with the engine: about 4.3 GB of wheels, 9.5 GB installed.
        default = ours.complete;
        # The entrypoint alone: every verb but serve and warm.
        relaunch = ours.plain;
        # A script that writes an OCI image to its stdout: `nix run .#image | docker load`.
        image = ours.image;
      };

      apps.${system} = {
        default = app "serve" ours.complete;
        # A plan needs neither GPU nor engine.
        plan = app "plan" ours.plain;
        doctor = app "doctor" ours.complete;
        # Several replicas behind one address; without the engine too.
        gateway = app "gateway" ours.gateway;
      };

      checks.${system} = import ./nix/checks.nix {
        inherit pkgs ours nixpkgs;
        inherit (self) nixosModules;
      };

      devShells.${system}.default = pkgs.mkShell {
        packages = [
          ours.development
          pkgs.nixfmt
        ];
      };

      formatter.${system} = pkgs.nixfmt-tree;

      nixosModules.default = import ./nix/module.nix;

      overlays.default =
        final: _:
        let
          offered = import ./nix { pkgs = final; };
        in
        {
          relaunch = offered.complete;
          relaunch-plain = offered.plain;
          relaunch-gateway = offered.gateway;
        };
    };
}
