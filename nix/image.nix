# The container image of the same closure, streamed: nothing of its size is written to the store.
{
  dockerTools,
  cacert,
  tini,
  relaunch,
}:
dockerTools.streamLayeredImage {
  name = "relaunch";
  tag = relaunch.version;
  contents = [
    relaunch
    # `docker exec`, and GIVE_UP_COMMAND.
    dockerTools.binSh
    dockerTools.usrBinEnv
  ];
  # Any uid may run it: what the volumes start from is writable by all.
  extraCommands = ''
    mkdir -p tmp var/lib/relaunch var/cache/relaunch var/cache/huggingface
    chmod 1777 tmp var/lib/relaunch var/cache/relaunch var/cache/huggingface
  '';
  config = {
    Entrypoint = [
      "${tini}/bin/tini"
      "--"
      "${relaunch}/bin/relaunch"
    ];
    Cmd = [ "serve" ];
    User = "10001:0";
    WorkingDir = "/var/lib/relaunch";
    StopSignal = "SIGTERM";
    ExposedPorts = {
      "30000/tcp" = { };
      "30001/tcp" = { };
    };
    Env = [
      "HOME=/var/cache/relaunch"
      "USER=relaunch"
      "HF_HOME=/var/cache/huggingface"
      "SSL_CERT_FILE=${cacert}/etc/ssl/certs/ca-bundle.crt"
      "RELAUNCH_STATE_DIR=/var/lib/relaunch"
      "RELAUNCH_CACHE_DIR=/var/cache/relaunch"
      "RELAUNCH_HOST=0.0.0.0"
      "RELAUNCH_CONTROL_HOST=0.0.0.0"
      "RELAUNCH_ON_GIVE_UP=hold"
      "NVIDIA_VISIBLE_DEVICES=all"
      "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    ];
    Labels = {
      "org.opencontainers.image.title" = "relaunch";
      "org.opencontainers.image.version" = relaunch.version;
    };
  };
}
