"""The compiled CPU kernels: C++ sources, how they are built, and their interface."""
