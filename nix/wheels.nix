# The wheels of a requirements lock, each fetched by its hash through nixpkgs' own fetchPypi.
{ fetchPypi }:
let
  known = builtins.fromJSON (builtins.readFile ../locks/wheels.json);

  # Package names of the lock's `name==version` lines. One whose marker excludes this system is not in wheels.json.
  names =
    lock:
    let
      lines = builtins.filter builtins.isString (builtins.split "\n" (builtins.readFile lock));
      name = line: builtins.match "([A-Za-z0-9._-]+)==.*" line;
    in
    builtins.concatMap (line: if name line == null then [ ] else name line) lines;

  # name-version-python-abi-platform.whl; a build number, were there one, stays a part of the version.
  fetch =
    wheel:
    let
      part = builtins.elemAt (builtins.match "([^-]+)-(.+)-([^-]+)-([^-]+)-([^-]+)\\.whl" wheel.file);
    in
    {
      inherit (wheel) file;
      src = fetchPypi {
        pname = part 0;
        version = part 1;
        format = "wheel";
        dist = part 2;
        python = part 2;
        abi = part 3;
        platform = part 4;
        inherit (wheel) sha256;
      };
    };
in
lock:
let
  wanted = names lock;
in
map fetch (builtins.filter (wheel: builtins.elem wheel.name wanted) known)
