"""Does traffic between this machine's GPUs arrive: shown by moving bytes, since an advertised path can be dead."""
