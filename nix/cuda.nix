# CUDA_HOME made of the wheels' own compiler, headers and libraries, as the image has it.
{
  runCommand,
  stdenv,
  engine,
}:
runCommand "relaunch-cuda" { nativeBuildInputs = [ stdenv.cc ]; } ''
  mkdir -p build $out
  cp -r ${../entrypoint/kernels} build/relaunch_kernels
  PYTHONPATH=build PYTHONDONTWRITEBYTECODE=1 ${engine}/bin/python -m relaunch_kernels.cuda_home $out/home
''
