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

  # The hub's client has a name of its own for a token in a file.
  secretVariable = name: if name == "hf_token" then "HF_TOKEN_PATH" else "${variable name}_FILE";

  # What the options of a service put into its environment, and where systemd reads its secrets.
  secretsOf = service: lib.filterAttrs (_: path: path != null) service.secrets;
  environmentOf =
    service:
    lib.mapAttrs (_: literal) service.environment
    // lib.mapAttrs' (name: value: lib.nameValuePair (variable name) (literal value)) (
      lib.filterAttrs (_: value: value != null) service.settings
    )
    // lib.mapAttrs' (name: _: lib.nameValuePair (secretVariable name) "%d/${name}") (secretsOf service);
  credentialsOf = service: lib.mapAttrsToList (name: path: "${name}:${path}") (secretsOf service);
  portOf = service: if service.settings.port == null then 30000 else service.settings.port;

  # What cannot work is refused when the system is built, not when the unit starts.
  requirementsOf =
    path: service:
    lib.mapAttrsToList (name: file: {
      assertion = !lib.hasPrefix builtins.storeDir file;
      message = "services.${path}.secrets.${name} = ${file} lies in the store, where everybody may read it: name a file elsewhere";
    }) (secretsOf service);

  # Options that both services have.
  common = {
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

    openFirewall = mkOption {
      type = types.bool;
      default = false;
      description = "Open the port of the endpoint. The control port stays closed.";
    };
  };

  # What confines both services.
  confined = {
    DynamicUser = true;
    TasksMax = "infinity";
    DevicePolicy = "closed";
    LockPersonality = true;
    NoNewPrivileges = true;
    PrivateTmp = true;
    ProtectClock = true;
    ProtectControlGroups = true;
    ProtectHome = true;
    ProtectHostname = true;
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
    UMask = "0077";
  };
in
{
  options.services.relaunch = common // {
    enable = lib.mkEnableOption "relaunch, which serves one model with sglang and keeps it served";

    package = mkOption {
      type = types.package;
      default = (import ./. { inherit pkgs; }).complete;
      defaultText = lib.literalExpression "relaunch with its engine";
      description = "The package that provides `bin/relaunch`.";
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

    kernelLog = mkOption {
      type = types.bool;
      default = true;
      description = "Let the service read the kernel's log (`CAP_SYSLOG`, `/dev/kmsg`): GPU errors (Xid) and out-of-memory kills are then evidence for why the engine ended. Without it such an end is named by what the engine wrote alone.";
    };

    gateway = common // {
      enable = lib.mkEnableOption "relaunch's gateway: one address for several replicas (`settings.replicas`)";

      package = mkOption {
        type = types.package;
        default = (import ./. { inherit pkgs; }).gateway;
        defaultText = lib.literalExpression "relaunch with its router, without the engine";
        description = "The package that provides `bin/relaunch`.";
      };
    };
  };

  config = {
    assertions =
      lib.optionals cfg.enable (
        requirementsOf "relaunch" cfg
        ++ [
          {
            assertion = cfg.settings.preset != null || cfg.settings.model != null;
            message = "services.relaunch says neither what to serve (settings.preset, a name of env/) nor from where (settings.model)";
          }
        ]
      )
      ++ lib.optionals cfg.gateway.enable (
        requirementsOf "relaunch.gateway" cfg.gateway
        ++ [
          {
            assertion = cfg.gateway.settings.replicas != null;
            message = "services.relaunch.gateway.settings.replicas names no replica";
          }
          {
            assertion = !cfg.enable || portOf cfg != portOf cfg.gateway;
            message = "services.relaunch and its gateway both listen on port ${toString (portOf cfg)}: give one of them another settings.port and settings.control_port";
          }
        ]
      );

    systemd.services.relaunch = lib.mkIf cfg.enable {
      description = "relaunch: one model served with sglang";
      wantedBy = [ "multi-user.target" ];
      wants = [ "network-online.target" ];
      after = [ "network-online.target" ];

      environment = {
        HOME = "/var/cache/relaunch";
        HF_HOME = cfg.weightsDirectory;
        RELAUNCH_STATE_DIR = "/var/lib/relaunch";
        RELAUNCH_CACHE_DIR = "/var/cache/relaunch";
      }
      // environmentOf cfg;

      serviceConfig = confined // {
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

        StateDirectory = "relaunch";
        CacheDirectory = "relaunch";
        WorkingDirectory = "/var/lib/relaunch";
        LoadCredential = credentialsOf cfg;

        # Pinned host memory for transfers, and one descriptor a shard and a connection.
        LimitMEMLOCK = "infinity";
        LimitNOFILE = 1048576;

        # The kernel's log says which GPU failed (Xid) and what ran out of memory; nothing else needs a capability.
        CapabilityBoundingSet = lib.optionalString cfg.kernelLog "CAP_SYSLOG";
        AmbientCapabilities = lib.optionalString cfg.kernelLog "CAP_SYSLOG";
        ProtectKernelLogs = !cfg.kernelLog;
        DeviceAllow = [
          # Every node of the driver; InfiniBand and RoCE between several hosts.
          "char-nvidia* rw"
          "char-infiniband* rw"
        ]
        ++ lib.optional cfg.kernelLog "/dev/kmsg r";
        # Kernels are compiled and mapped while it runs.
        MemoryDenyWriteExecute = false;
        # @debug: the stacks of a hung engine are read with ptrace.
        SystemCallFilter = [
          "@system-service"
          "@debug"
        ];
      };
    };

    systemd.services.relaunch-gateway = lib.mkIf cfg.gateway.enable {
      description = "relaunch: one address for several replicas";
      wantedBy = [ "multi-user.target" ];
      wants = [ "network-online.target" ];
      after = [ "network-online.target" ];

      environment = {
        HOME = "/var/lib/relaunch-gateway";
        RELAUNCH_STATE_DIR = "/var/lib/relaunch-gateway";
      }
      // environmentOf cfg.gateway;

      serviceConfig = confined // {
        ExecStart = "${cfg.gateway.package}/bin/relaunch gateway";
        TimeoutStopSec = "3min";
        KillMode = "mixed";
        Restart = "on-failure";
        RestartSec = "5s";
        # A wrong setting, which no restart can cure.
        RestartPreventExitStatus = "64 78";
        StateDirectory = "relaunch-gateway";
        WorkingDirectory = "/var/lib/relaunch-gateway";
        LoadCredential = credentialsOf cfg.gateway;
        LimitNOFILE = 1048576;
        CapabilityBoundingSet = "";
        ProtectKernelLogs = true;
        SystemCallFilter = [ "@system-service" ];
      };
    };

    networking.firewall.allowedTCPPorts =
      lib.optional (cfg.enable && cfg.openFirewall) (portOf cfg)
      ++ lib.optional (cfg.gateway.enable && cfg.gateway.openFirewall) (portOf cfg.gateway);
  };
}
