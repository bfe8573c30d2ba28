# shellcheck shell=sh
# usage: initramfs.sh FILE...: the kernels whose initramfs was made before one of the files was written.
for image in /boot/initrd.img-*; do
  kernel=${image#/boot/initrd.img-}
  # Without a kernel it is somebody's backup, and without modules nothing is made anew of it.
  [ -e "/boot/vmlinuz-$kernel" ] && [ -d "/lib/modules/$kernel" ] || continue
  for file; do
    if [ "$file" -nt "$image" ]; then echo "$kernel"; break; fi
  done
done
