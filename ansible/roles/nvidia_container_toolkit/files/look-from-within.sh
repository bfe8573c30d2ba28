# shellcheck shell=sh
# Opens every node as a program would, and asks the driver through its own library.
for node in /dev/nvidia*; do
  [ -c "$node" ] || continue
  # In a shell of its own, which ends where it cannot.
  if said=$( (exec 3<"$node") 2>&1); then echo "opened $node"; else echo "$said"; failed=1; fi
done
nvidia-smi -L || failed=1
exit "${failed:-0}"
