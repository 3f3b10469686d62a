let
  here = builtins.fromJSON (builtins.readFile ./here.json);
  # The real one where the test has found it.
  realLib = builtins.pathExists ./real/lib;
  lib = if realLib then import ./real/lib else import ./lib.nix;
  system = "x86_64-linux";

  # Sets up what stdenv sets up, as far as it is used: strictness, a PATH, and the command.
  setup = builtins.toFile "setup.sh" ''
    set -euo pipefail
    export PATH=/usr/bin:/bin
    for input in ''${nativeBuildInputs:-}; do PATH=$input/bin:$PATH; done
    export TMPDIR=''${TMPDIR:-$PWD} SOURCE_DATE_EPOCH=315532800
    cd "$TMPDIR"
    eval "$buildCommand"
    # The last word is the shell's own: nix kills a builder whose standard error is closed before it has ended, as
    # coreutils close theirs when bash execs the last command of a script (seen with nix 2.8, 2.26 and 2.34).
    exit 0
  '';
  runCommand =
    name: attrs: buildCommand:
    let
      env = builtins.removeAttrs attrs [
        "passthru"
        "meta"
      ];
      drv = derivation (
        env
        // {
          inherit name system buildCommand;
          builder = "/bin/bash";
          args = [ setup ];
        }
      );
    in
    drv // (attrs.passthru or { }) // { meta = attrs.meta or { }; };
  # Names of this machine's files under one folder, such as bin/gcc.
  links =
    name: folder: paths:
    runCommand name { } ''
      mkdir -p $out/${folder}
      for path in ${builtins.concatStringsSep " " paths}; do ln -s "$path" $out/${folder}/; done
    '';
  host =
    folder: names:
    map (name: "${folder}/${name}") (builtins.filter builtins.isString (builtins.split " " names));
  writeShellScriptBin =
    name: text:
    runCommand name
      {
        text = "#!/bin/bash\n${text}\n";
        passAsFile = [ "text" ];
      }
      ''
        mkdir -p $out/bin
        cp $textPath $out/bin/${name}
        chmod 755 $out/bin/${name}
      '';
  pkgs = rec {
    inherit
      lib
      realLib
      runCommand
      writeShellScriptBin
      ;
    callPackage =
      file: given:
      let
        f = import file;
        wanted = builtins.functionArgs f;
      in
      f (builtins.intersectAttrs wanted pkgs // given);

    # As nixpkgs' pkgs/build-support/fetchpypi: the same arguments, the same file; only the address is looked up.
    fetchPypi =
      {
        pname,
        version,
        format,
        dist,
        python,
        abi,
        platform,
        sha256,
      }:
      let
        file = "${pname}-${version}-${python}-${abi}-${platform}.whl";
      in
      assert format == "wheel" && dist == python;
      derivation {
        name = file;
        inherit system;
        builder = "builtin:fetchurl";
        url = here.addresses.${file};
        outputHashMode = "flat";
        outputHashAlgo = "sha256";
        outputHash = sha256;
        preferLocalBuild = true;
        executable = false;
        unpack = false;
      };

    python312.outPath = here.python;
    uv = links "uv" "bin" [ here.uv ];
    patchelf = links "patchelf" "bin" [ here.patchelf ];
    coreutils = links "coreutils" "bin" (host "/bin" "kill mkdir ln");
    tini = links "tini" "bin" [ "/bin/true" ];
    cacert = links "cacert" "etc/ssl/certs" [ ];
    numactl = links "numactl" "lib" [ ];
    rdma-core = links "rdma-core" "lib" [ ];
    runtimeShell = "/bin/bash";
    stdenv.cc = links "cc" "bin" (host "/usr/bin" "gcc g++ cc ld as ar") // {
      cc = links "cc-lib" "lib" here.libraries;
      bintools.dynamicLinker = "/lib64/ld-linux-x86-64.so.2";
    };
    nixfmt = writeShellScriptBin "nixfmt" "exec ${here.python}/bin/python3.12 ${./nixfmt.py} \"$@\"";
    nixfmt-tree = nixfmt;
    mkShell = { packages }: runCommand "shell" { inherit packages; } "echo $packages > $out";
    # Prints the configuration that the real one would write into the image.
    dockerTools = {
      binSh = links "bin-sh" "bin" [ "/bin/sh" ];
      usrBinEnv = links "usr-bin-env" "usr/bin" [ "/usr/bin/env" ];
      streamLayeredImage =
        image@{
          name,
          tag,
          contents,
          extraCommands,
          config,
        }:
        runCommand "stream-${name}"
          {
            document = builtins.toJSON image;
            passAsFile = [ "document" ];
          }
          ''
            printf '#!/bin/bash\ncat <<"END"\n%s\nEND\n' "$(cat $documentPath)" > $out
            chmod 755 $out
          '';
    };
  };
in
pkgs
