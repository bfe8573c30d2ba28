"""What Aerie knows of a host with PCIe GPUs: read from sysfs, /proc and the driver, judged without I/O."""
