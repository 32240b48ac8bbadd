# shellcheck shell=dash
# What happens to a connected host: a reset, the node killed and served again under load, namespaces added and
# removed, its name taken from the list. Sourced by guest-blocks.sh, connected.

# loaded NSID: starts a load in the background whose every block is verified in the end; waits until it writes.
# Its number of blocks is bound by rate, so that what happens meanwhile happens to it.
loaded() {
    disk "$1"
    before=$(writes)
    fio --name=loaded --filename="$disk" --direct=1 --ioengine=libaio --verify=crc32c --verify_fatal=1 --thread \
        --rw=randwrite --bsrange=4k-64k --blockalign=4k --size=16m --offset=64m --iodepth=16 --rate=,8m \
        --output=/tmp/load --eta=never 2>/tmp/load-err &
    load=$!
    await busy || fail "the load did not begin"
}
# writes: those of $disk that were completed; the kernel counts them on its paths.
writes() { cat /sys/block/nvme*c*"n${disk##*n}/stat" | awk '{ sum += $5 } END { print sum + 0 }'; }
busy() { [ "$(writes)" -gt $((before + 20)) ]; }
in_flight() { kill -0 $load 2>/dev/null; }
load_held() {
    wait $load || { cp /tmp/load /tmp/out; cp /tmp/load-err /tmp/err; fail "the load's blocks are not what was written"; }
    grep -Eq 'err= *0' /tmp/load || fail "the load met an error"
}

step "a controller reset under load: no block is lost"
loaded 2
the_controller || fail "there is no controller"
run nvme reset "/dev/$controller"
in_flight || fail "the load was over before the reset"
load_held
await controller_is live || fail "the controller is not live after the reset"

step "the node is killed and served again under load: the kernel reconnects, no block is lost"
loaded 3
ask kill
await controller_is connecting || fail "the kernel did not notice that the node is gone"
in_flight || fail "the load was over before the kill"
ask serve
load_held
await controller_is live || fail "the controller is not live after the restart"
await namespace_device || fail "the KV namespace did not come back"

# shellcheck source=tests/kernel/again.sh
. /again.sh
whole 2

step "a namespace added to the running node appears by itself, and works"
no_disk_of 9 || fail "namespace 9 is there before it was made"
ask add 9
disk 9
verified added --rw=randrw --bs=4k --size=4m --iodepth=8 || fail "fio found a difference"

step "a namespace removed from the running node vanishes by itself; the others are used meanwhile"
loaded 2
ask remove 9
await no_disk_of 9 || fail "the disk is there 20 s after its namespace was removed"
load_held

step "a persistent discovery controller stays connected"
discover -p || fail "nvme discover -p failed"
says "subnqn: *$OCTOKV_NQN\$"
await discovery_controller || fail "no discovery controller stayed"
[ "$(cat "/sys/class/nvme/$discovery/cntrltype")" = discovery ] || fail "the kernel takes it for another kind"
# The kernel reports the notice that the discovery log changed, 70f002h, in a uevent of the controller's device.
: >/tmp/uevents
# shellcheck disable=SC2016 # The variables are the event's.
uevent sh -c 'echo "$DEVNAME $NVME_AEN"' >>/tmp/uevents 2>/dev/null &
events=$!
told() { grep -Eq "^$discovery 0x0*70f002\$" /tmp/uevents; }
# The kernel drops a uevent that no process receives, and the notice is not repeated until the log is read. So the
# change waits for the receiver: a synthetic uevent of the device has to arrive first.
receiving() { echo change >"/sys/class/nvme/$discovery/uevent" && grep -q "^$discovery " /tmp/uevents; }
await receiving || fail "no synthetic uevent of the discovery controller arrived within 20 s"

step "a host that is taken from the list: its controller is lost, connecting is refused, discovery hides the subsystem"
ask host deny any
await controller_is connecting || fail "the controller of a host that is not listed stayed"
await told || { cp /tmp/uevents /tmp/out; fail "no event told of the changed discovery log"; }
disconnect
try_connect && fail "a host that is not listed was let in"
dmesg >/tmp/out
says "Connect for subsystem $OCTOKV_NQN is not allowed, hostnqn: $host_nqn"
for how in "-t tcp -a $host_address -s $OCTOKV_PORT" "-d $discovery"; do
    # shellcheck disable=SC2086 # Options.
    run nvme discover $how -q $host_nqn -I $host_id
    says "Discovery Log Number of Records"
    grep -q "subnqn: *$OCTOKV_NQN\$" /tmp/out && fail "discovery names the subsystem to a host that is not listed ($how)"
done

step "the host is put on the list: it is told, and let in again"
: >/tmp/uevents
ask host allow $host_nqn
await told || { cp /tmp/uevents /tmp/out; fail "no event told of the changed discovery log"; }
run nvme discover -d "$discovery"
says "subnqn: *$OCTOKV_NQN\$"
kill $events 2>/dev/null || :
run nvme disconnect -d "$discovery"
# shellcheck disable=SC2119 # No options wanted.
connect
whole 3
disconnect
