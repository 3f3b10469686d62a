# NixOS: services.relaunch. The options below `settings` are the settings themselves (nix/settings.json is made from
# entrypoint/config/settings.py), so that this page cannot fall behind.
{
  config,
  lib,
  pkgs,
  ...
}:
let
  inherit (lib) mkOption types;

  cfg = config.services.relaunch;
  known = builtins.fromJSON (builtins.readFile ./settings.json);
  plain = lib.filterAttrs (_: setting: !setting.secret) known;
  secret = lib.filterAttrs (_: setting: setting.secret) known;

  described =
    setting: setting.help + lib.optionalString (setting.default != null) " Default: `${setting.default}`.";

  option =
    _: setting:
    mkOption {
      type = types.nullOr (
        if setting.choices != [ ] then
          types.enum setting.choices
        else
          types.oneOf [
            types.bool
            types.int
            types.float
            types.str
          ]
      );
      default = null;
      description = described setting;
    };

  variable = name: "RELAUNCH_${lib.toUpper name}";
  written =
    value: if builtins.isBool value then (if value then "on" else "off") else toString value;
  # systemd expands specifiers in Environment=: a value of ours means itself.
  literal = value: builtins.replaceStrings [ "%" ] [ "%%" ] (written value);

  given = lib.filterAttrs (_: value: value != null) cfg.settings;
  secrets = lib.filterAttrs (_: path: path != null) cfg.secrets;
  # The hub's client has a name of its own for a token in a file.
  secretVariable = name: if name == "hf_token" then "HF_TOKEN_PATH" else "${variable name}_FILE";
in
{
  options.services.relaunch = {
    enable = lib.mkEnableOption "relaunch, which serves one model with sglang and keeps it served";

    package = mkOption {
      type = types.package;
      default = (import ./. { inherit pkgs; }).complete;
      defaultText = lib.literalExpression "relaunch with its engine";
      description = "The package that provides `bin/relaunch`.";
    };

    settings = lib.mapAttrs option plain;

    secrets =
      lib.mapAttrs (
        _: setting:
        mkOption {
          type = types.nullOr types.str;
          default = null;
          description = setting.help + " Path of a file outside the store, read by systemd (`LoadCredential=`).";
        }
      ) secret
      // {
        hf_token = mkOption {
          type = types.nullOr types.str;
          default = null;
          description = "Path of a file with the hub's token, read by systemd (`LoadCredential=`).";
        };
      };

    environment = mkOption {
      type = types.attrsOf types.str;
      default = { };
      example = {
        NCCL_P2P_LEVEL = "SYS";
      };
      description = "Further variables for relaunch and its engine: `NCCL_*`, `SGLANG_*`, `HF_*`, `CUDA_VISIBLE_DEVICES`.";
    };

    weightsDirectory = mkOption {
      type = types.str;
      default = "/var/cache/relaunch/huggingface";
      description = "`HF_HOME`: where weights are downloaded to. Another place must be writable for the service.";
    };

    watchdog = mkOption {
      type = types.str;
      default = "60s";
      description = "Once serving: no sign of life from the supervisor's loop for this long, and systemd restarts it.";
    };

    openFirewall = mkOption {
      type = types.bool;
      default = false;
      description = "Open the port of the endpoint. The control port stays closed.";
    };
  };

  config = lib.mkIf cfg.enable {
    systemd.services.relaunch = {
      description = "relaunch: one model served with sglang";
      wantedBy = [ "multi-user.target" ];
      wants = [ "network-online.target" ];
      after = [ "network-online.target" ];

      environment =
        {
          HOME = "/var/cache/relaunch";
          HF_HOME = cfg.weightsDirectory;
          RELAUNCH_STATE_DIR = "/var/lib/relaunch";
          RELAUNCH_CACHE_DIR = "/var/cache/relaunch";
        }
        // lib.mapAttrs (_: literal) cfg.environment
        // lib.mapAttrs' (name: value: lib.nameValuePair (variable name) (literal value)) given
        // lib.mapAttrs' (name: _: lib.nameValuePair (secretVariable name) "%d/${name}") secrets;

      serviceConfig = {
        Type = "notify";
        NotifyAccess = "main";
        ExecStart = "${cfg.package}/bin/relaunch serve";
        # Drains and restarts the engine in the same supervisor.
        ExecReload = "${pkgs.coreutils}/bin/kill -HUP $MAINPID";
        # Ready is when clients can be served. The supervisor has time limits of its own for every stage before that,
        # and asks for what its drain may take.
        TimeoutStartSec = "infinity";
        TimeoutStopSec = "3min";
        WatchdogSec = cfg.watchdog;
        # The supervisor ends its own tree; systemd ends what is left.
        KillMode = "mixed";
        Restart = "on-failure";
        RestartSec = "30s";
        # Causes that no restart can cure.
        RestartPreventExitStatus = "64 65 66 70 73 77 78";

        DynamicUser = true;
        StateDirectory = "relaunch";
        CacheDirectory = "relaunch";
        WorkingDirectory = "/var/lib/relaunch";
        LoadCredential = lib.mapAttrsToList (name: path: "${name}:${path}") secrets;

        # Pinned host memory for transfers, and one descriptor a shard and a connection.
        LimitMEMLOCK = "infinity";
        LimitNOFILE = 1048576;
        TasksMax = "infinity";

        CapabilityBoundingSet = "";
        DevicePolicy = "closed";
        DeviceAllow = [
          "char-nvidia rw"
          "char-nvidiactl rw"
          "char-nvidia-caps rw"
          "char-nvidia-frontend rw"
          "char-nvidia-uvm rw"
        ];
        LockPersonality = true;
        # Kernels are compiled and mapped while it runs.
        MemoryDenyWriteExecute = false;
        NoNewPrivileges = true;
        PrivateTmp = true;
        ProtectClock = true;
        ProtectControlGroups = true;
        ProtectHome = true;
        ProtectHostname = true;
        ProtectKernelLogs = true;
        ProtectKernelModules = true;
        ProtectKernelTunables = true;
        ProtectSystem = "strict";
        # NETLINK: NCCL lists the interfaces.
        RestrictAddressFamilies = [
          "AF_INET"
          "AF_INET6"
          "AF_UNIX"
          "AF_NETLINK"
        ];
        RestrictNamespaces = true;
        RestrictRealtime = true;
        RestrictSUIDSGID = true;
        SystemCallArchitectures = "native";
        # @debug: the stacks of a hung engine are read with ptrace.
        SystemCallFilter = [
          "@system-service"
          "@debug"
        ];
        UMask = "0077";
      };
    };

    networking.firewall = lib.mkIf cfg.openFirewall {
      allowedTCPPorts = [ (if cfg.settings.port == null then 30000 else cfg.settings.port) ];
    };
  };
}
