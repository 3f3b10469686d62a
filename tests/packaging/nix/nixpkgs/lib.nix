rec {
  inherit (builtins) concatStringsSep mapAttrs;

  boolToString = value: if value then "true" else "false";
  optional = condition: value: if condition then [ value ] else [ ];
  optionals = condition: list: if condition then list else [ ];
  hasPrefix = prefix: text: builtins.substring 0 (builtins.stringLength prefix) text == prefix;
  optionalString = condition: text: if condition then text else "";
  concatMapStringsSep = separator: f: list: concatStringsSep separator (map f list);
  hasSuffix =
    suffix: text:
    let
      from = builtins.stringLength text - builtins.stringLength suffix;
    in
    from >= 0 && builtins.substring from (-1) text == suffix;
  lower = "abcdefghijklmnopqrstuvwxyz";
  letters = text: builtins.genList (i: builtins.substring i 1 text) (builtins.stringLength text);
  toUpper = builtins.replaceStrings (letters lower) (letters "ABCDEFGHIJKLMNOPQRSTUVWXYZ");

  nameValuePair = name: value: { inherit name value; };
  mapAttrsToList = f: set: map (name: f name set.${name}) (builtins.attrNames set);
  mapAttrs' = f: set: builtins.listToAttrs (mapAttrsToList f set);
  filterAttrs =
    keep: set:
    builtins.listToAttrs (
      builtins.filter (pair: keep pair.name pair.value) (mapAttrsToList nameValuePair set)
    );

  makeSearchPath = sub: concatMapStringsSep ":" (package: "${package}/${sub}");
  makeBinPath = makeSearchPath "bin";
  makeLibraryPath = makeSearchPath "lib";

  filesystem.listFilesRecursive =
    folder:
    builtins.concatMap (
      name:
      if (builtins.readDir folder).${name} == "directory" then
        filesystem.listFilesRecursive (folder + "/${name}")
      else
        [ (folder + "/${name}") ]
    ) (builtins.attrNames (builtins.readDir folder));

  # Options: a type is its check.
  mkOption = option: option // { _type = "option"; };
  mkEnableOption =
    text:
    mkOption {
      type = types.bool;
      default = false;
      description = text;
    };
  mkIf = condition: content: {
    _type = "if";
    inherit condition content;
  };
  literalExpression = text: text;
  types = {
    bool = builtins.isBool;
    int = builtins.isInt;
    float = builtins.isFloat;
    str = builtins.isString;
    package = value: value ? outPath;
    enum = words: value: builtins.elem value words;
    nullOr = type: value: value == null || type value;
    oneOf = kinds: value: builtins.any (type: type value) kinds;
    attrsOf = type: value: builtins.isAttrs value && builtins.all type (builtins.attrValues value);
  };
}
