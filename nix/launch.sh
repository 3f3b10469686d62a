#!@shell@
# Starts relaunch from the Nix store. Names between @ are filled in by nix/package.nix.
set -eu

unset PYTHONHOME PYTHONDONTWRITEBYTECODE
export PYTHONPATH="@app@" PATH="@path@${PATH:+:$PATH}"
libraries=@libraries@
cuda=@cuda@

# The driver belongs to the host, never to the closure. NixOS keeps it in a folder of its own; elsewhere it lies among
# the distribution's libraries, which must not come with it: only its own files are linked into a folder of ours.
driver=
for folder in /run/opengl-driver/lib /usr/lib/wsl/lib /usr/local/nvidia/lib64 /usr/lib/x86_64-linux-gnu /usr/lib64 /usr/lib; do
    if [ -e "$folder/libcuda.so.1" ] || [ -e "$folder/libnvidia-ml.so.1" ]; then
        driver=$folder
        break
    fi
done
case $driver in
    /usr/lib/x86_64-linux-gnu | /usr/lib64 | /usr/lib)
        cache=${RELAUNCH_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/relaunch}
        if mkdir -p "$cache/driver" 2> /dev/null && [ -w "$cache/driver" ]; then
            for file in "$driver"/libcuda.so* "$driver"/libcudadebugger.so* "$driver"/libnvidia-*.so*; do
                [ ! -e "$file" ] || ln -sfn "$file" "$cache/driver/${file##*/}"
            done
            driver=$cache/driver
        else
            printf 'relaunch: cannot write %s/driver, so the GPU driver in %s is not used\n' "$cache" "$driver" >&2
            driver=
        fi
        ;;
esac

# After the libraries of the closure, before what the operator has set; never a stub.
export LD_LIBRARY_PATH="$libraries${driver:+:$driver}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
if [ -n "$driver" ]; then export TRITON_LIBCUDA_PATH="${TRITON_LIBCUDA_PATH:-$driver}"; fi
if [ -n "$cuda" ]; then export CUDA_HOME="${CUDA_HOME:-$cuda}"; fi

exec @python@ -P -m entrypoint "$@"
