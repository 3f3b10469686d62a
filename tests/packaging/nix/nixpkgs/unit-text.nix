# The text of a unit as nixpkgs' nixos/lib/systemd-lib.nix writes it: Environment= as JSON strings, one line for each element
# of a list.
lib: service:
let
  plain = value: if builtins.isBool value then lib.boolToString value else toString value;
  lines =
    name: value:
    if builtins.isList value then
      lib.concatMapStringsSep "\n" (item: "${name}=${plain item}") value
    else
      "${name}=${plain value}";
  section =
    set:
    builtins.concatStringsSep "\n" (
      builtins.filter (line: line != "") (lib.mapAttrsToList lines set)
    );
  variables = lib.mapAttrsToList (
    name: value: "Environment=${builtins.toJSON "${name}=${value}"}"
  );
  text = ''
    [Unit]
    Description=${service.description}
    After=${toString service.after}
    Wants=${toString service.wants}

    [Service]
    ${builtins.concatStringsSep "\n" (variables service.environment)}
    ${section service.serviceConfig}
  '';
in
text
