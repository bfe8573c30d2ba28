# shellcheck shell=sh
# usage: install.sh LOCK_TIMEOUT SOURCE PINNING NEXT_KERNEL RUNNING_KERNEL PACKAGE...
# Updates apt from SOURCE (empty: from none in particular), whose signature must be good, and from the others as far as they answer.
# Then the pin, headers for both kernels, metapackages of headers beside those of images, and the packages. A PACKAGE with a minus at
# its end goes in the same step.
set -eu
lock=$1 source=$2 pinning=$3 next=$4 running=$5
shift 5
# What goes, goes with its configuration: a pin, or another driver's options of modules, would still work.
set -- -q install --yes --purge --no-install-recommends --allow-downgrades --allow-change-held-packages \
  -o "DPkg::Lock::Timeout=$lock" "$@"

apt-get -q update
# A source of which only an older index is there is no error to apt, and a forged one must not pass for that.
[ -z "$source" ] || apt-get -q update -o APT::Update::Error-Mode=any -o APT::Get::List-Cleanup=0 \
  -o "Dir::Etc::sourcelist=$source" -o Dir::Etc::sourceparts=-

# A held library keeps its release, and so those that need the same one. Held again in any case, and what is new by the role.
held=$(apt-mark showhold | grep -E '(nvidia|^libcuda|^libnv|^cuda-drivers)' | grep -v container || true)
hold_again() { for name in $held; do apt-mark hold "$name" || true; done; }
if [ -n "$held" ]; then
  # shellcheck disable=SC2086  # names
  apt-mark unhold $held
  trap hold_again EXIT
fi
# One pin at a time: two of them would let both releases in.
others=$(dpkg-query --show --showformat '${db:Status-Status} ${Package}\n' 'nvidia-driver-pinning-*' 2>/dev/null \
  | sed -n "/ $pinning\$/d; s/^installed \(.*\)/\1-/p")
# shellcheck disable=SC2086  # names
apt-get -q install --yes --purge --no-install-recommends --allow-downgrades --allow-change-held-packages \
  -o "DPkg::Lock::Timeout=$lock" "$pinning" $others

[ -e "/lib/modules/$next/build" ] || set -- "$@" "linux-headers-$next"
# Headers of a kernel that only still runs may be out of the archive, and the next boot does without.
if [ "$running" != "$next" ] && [ ! -e "/lib/modules/$running/build" ] && apt-cache show "linux-headers-$running" >/dev/null 2>&1; then
  set -- "$@" "linux-headers-$running"
fi
# Else a kernel that arrives later would arrive without what its modules are built with. Of the image's own version: a newer one would
# bring headers of a kernel that is not there.
for image in $(dpkg-query --show --showformat '${db:Status-Status} ${Package}=${Version}\n' 'linux-image-*' 2>/dev/null | sed -n 's/^installed //p'); do
  headers=linux-headers-${image#linux-image-}
  case $image in
    linux-image-[0-9]*|linux-image-unsigned-*|*-dbg=*) ;;
    *) ! apt-cache show "$headers" >/dev/null 2>&1 || set -- "$@" "$headers" ;;
  esac
done
apt-get "$@"
