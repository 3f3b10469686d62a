# lib.nixosSystem, as far as one service goes: options with defaults and checked types, mkIf, assertions. Where the real
# lib of nixpkgs is at hand, `modules.nix` is used in its place.
pkgs:
{ modules }:
let
  inherit (pkgs) lib;
  isOption = value: builtins.isAttrs value && value._type or "" == "option";
  merge =
    a: b:
    a
    // builtins.mapAttrs (
      name: value:
      if a ? ${name} && builtins.isAttrs value && builtins.isAttrs a.${name} && !(value ? outPath) then
        merge a.${name} value
      else
        value
    ) b;
  # mkIf, wherever it stands.
  resolve =
    value:
    if !builtins.isAttrs value || value ? outPath then
      value
    else if value._type or "" == "if" then
      (if value.condition then resolve value.content else { })
    else
      builtins.mapAttrs (_: resolve) value;
  # Values in the shape of the options; a name that is no option is an error.
  settle =
    path: options: given:
    let
      unknown = builtins.removeAttrs given (builtins.attrNames options);
    in
    if unknown != { } then
      throw "no such option: ${path}.${builtins.head (builtins.attrNames unknown)}"
    else
      builtins.mapAttrs (
        name: option:
        let
          here = "${path}.${name}";
          value = given.${name} or option.default;
        in
        if !isOption option then
          settle here option (given.${name} or { })
        else if option.type value then
          value
        else
          throw "${here}: not a value of its type"
      ) options;

  # Modules see the options' values alone: ours reads nothing else of the system.
  seen.services.relaunch =
    settle "services.relaunch" options.services.relaunch byUser.services.relaunch;
  called = map (
    module:
    if builtins.isFunction module then
      module {
        inherit lib pkgs;
        config = seen;
      }
    else
      module
  ) modules;
  options = builtins.foldl' merge { } (map (module: module.options or { }) called);
  byUser = builtins.foldl' merge { } (builtins.filter (module: !(module ? options)) called);
  defined = builtins.foldl' merge { } (map (module: resolve (module.config or { })) called);
  config = merge (merge byUser defined) {
    inherit (seen) services;
    systemd.units = lib.mapAttrs' (
      name: service: lib.nameValuePair "${name}.service" { text = import ./unit-text.nix lib service; }
    ) defined.systemd.services;
  };
in
{
  inherit config;
}
