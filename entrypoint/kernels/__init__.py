"""What the installed CUDA packages are: binaries and the GPUs they run on, the compiler, kernels compiled ahead.

Imports the standard library alone, so that an image build can run it before the rest of relaunch is there."""
