# shellcheck shell=dash
# The whole life of keys through the kernel's initiator, on an empty namespace.
# Sourced by guest-keys.sh. Leaves four keys behind, for those who look later (again.sh, the host's own client).

step "discover: the discovery log names the subsystem"
discover || fail "nvme discover failed"
grep -q "subnqn: *$OCTOKV_NQN\$" /tmp/out || fail "the log does not name $OCTOKV_NQN"

step "connect: a KV namespace appears as a character device"
connect
nvme id-ctrl "$device" >/tmp/out 2>/tmp/err || fail "nvme id-ctrl failed"
keys_are

step "store and retrieve 100 B, 4 KiB and 100 KiB"
for size in 100 4096 102400; do
    store "value-$size" "/data/$size" || fail "storing $size B failed"
    holds "value-$size" "/data/$size"
done

step "a key of one byte and a key of sixteen bytes"
store k /data/100 || fail "storing under a one-byte key failed"
store sixteen-bytes-16 /data/4096 || fail "storing under a sixteen-byte key failed"
holds k /data/100
holds sixteen-bytes-16 /data/4096

step "a buffer smaller than the value: its head, and the full length in the completion"
retrieve value-4096 512 || fail "the short retrieve failed"
completion_is 4096
head -c 512 /data/4096 >/tmp/head
cmp /tmp/out /tmp/head || fail "the head differs"

step "exist"
exist value-4096 || fail "a stored key does not exist"
refused_with 87 exist nobody

step "a missing key is refused with 87h"
refused_with 87 retrieve nobody 4096

step "add only: a present key is refused with 89h and keeps its value"
refused_with 89 store value-100 /data/4096 2
holds value-100 /data/100
store added /data/100 2 || fail "add-only of a new key failed"
holds added /data/100

step "update only: a missing key is refused with 87h and stays missing"
refused_with 87 store nobody /data/100 1
refused_with 87 exist nobody
store added /data/4096 1 || fail "update-only of a present key failed"
holds added /data/4096

step "list names every key once"
keys_are value-100 value-4096 value-102400 k sixteen-bytes-16 added

step "delete: the key is gone from every command"
delete k || fail "the delete failed"
delete added || fail "the delete failed"
refused_with 87 exist k
refused_with 87 retrieve k 4096
keys_are value-100 value-4096 value-102400 sixteen-bytes-16

step "disconnect and reconnect: the data are still there"
disconnect
connect
holds value-100 /data/100
holds value-4096 /data/4096
holds value-102400 /data/102400
disconnect

step "header and data digests"
connect -g -G
holds value-102400 /data/102400
store value-100 /data/100 || fail "storing 100 B with digests failed"
store value-4096 /data/4096 || fail "storing 4 KiB with digests failed"
store value-102400 /data/102400 || fail "storing 100 KiB with digests failed"
holds value-100 /data/100
holds value-4096 /data/4096
holds value-102400 /data/102400
disconnect

step "two I/O queues, used from both processors"
connect -i 2
# One more than asked for: the admin queue.
[ "$(cat /sys/class/nvme/nvme*/queue_count)" = 3 ] || fail "the kernel did not create two I/O queues"
for cpu in 0 1; do
    # The initiator has one queue per processor: the mask chooses the queue.
    taskset -p $((cpu + 1)) $$ >/dev/null || fail "this guest has no processor $cpu"
    store "queue-$cpu" /data/4096 || fail "storing through the queue of processor $cpu failed"
    holds "queue-$cpu" /data/4096
    holds value-102400 /data/102400
done
taskset -p 3 $$ >/dev/null
delete queue-0 || fail "the delete failed"
delete queue-1 || fail "the delete failed"
keys_are value-100 value-4096 value-102400 sixteen-bytes-16
disconnect
