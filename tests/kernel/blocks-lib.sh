# shellcheck shell=dash
# What the scripts on block namespaces share. Needs lib.sh.

# The shell would take its own smaller ones.
blkdiscard() { /usr/sbin/blkdiscard "$@"; }
fstrim() { /usr/sbin/fstrim "$@"; }

# disk_of NSID: the block device of a namespace, in $disk; the kernel numbers devices as it likes.
disk_of() {
    for node in /sys/block/nvme*; do
        disk=/dev/${node##*/}
        [ -b "$disk" ] && [ "$(cat "$node/nsid" 2>/dev/null)" = "$1" ] && return 0
    done
    return 1
}
no_disk_of() { ! disk_of "$1"; }

# disk NSID: as disk_of, and waits for it.
disk() { await disk_of "$1" || fail "no block device of namespace $1 appeared within 20 s"; }

# limit NAME: one of the kernel's limits for $disk.
limit() { cat "/sys/block/${disk##*/}/queue/$1"; }

# verified NAME OPTIONS...: fio writes to $disk, reads it back and compares a CRC-32C of each block.
verified() {
    name=$1
    shift
    fio --name="$name" --filename="$disk" --direct=1 --ioengine=libaio --verify=crc32c --verify_fatal=1 \
        --randrepeat=1 --thread --invalidate=1 --output=/tmp/out --eta=never "$@" 2>/tmp/err
}

# zeroes FROM COUNT: these bytes of $disk are all zero.
zeroes() {
    dd if="$disk" bs=65536 skip=$(($1 / 65536)) count=$(($2 / 65536)) iflag=direct 2>/dev/null | cmp -n "$2" - /dev/zero
}

# controller: the only controller of the subsystem, as nvme0, in $controller.
the_controller() {
    for node in /sys/class/nvme/nvme*; do
        [ "$(cat "$node/subsysnqn")" = "$OCTOKV_NQN" ] && controller=${node##*/} && return 0
    done
    return 1
}
controller_is() { the_controller && [ "$(cat "/sys/class/nvme/$controller/state")" = "$1" ]; }
discovery_controller() {
    for node in /sys/class/nvme/nvme*; do
        [ "$(cat "$node/subsysnqn")" = nqn.2014-08.org.nvmexpress.discovery ] && discovery=${node##*/} && return 0
    done
    return 1
}
