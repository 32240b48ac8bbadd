# shellcheck shell=dash
# NetKVS's architectures (a), (c) and (d) from this guest, one after the other, in rounds, against one node:
# RocksDB on ext4 on the kernel's disk; the hash engine here on a namespace of blocks; Key Value commands.
# In:  OCTOKV_FILES, the namespace of the file system; OCTOKV_ROUNDS, per round "KV:BLOCKS," with fresh namespaces of
#      keys for (d) and of blocks for (c); OCTOKV_THREADS; OCTOKV_OPS per thread; OCTOKV_VALUE in bytes.
# Out: per run "result: NAME begin", what the program printed, "result: NAME end STATUS".
. /lib.sh

# rocksdb OPTIONS...: on a new file system.
rocksdb() {
    mkfs.ext4 -q -F "$disk" && mount -t ext4 "$disk" /mnt || return 1
    outcome=0
    db_bench --db=/mnt/rocksdb --benchmarks=fillseq --threads="$OCTOKV_THREADS" --num="$OCTOKV_OPS" --key_size=16 \
        --value_size="$OCTOKV_VALUE" --compression_type=none --histogram=1 "$@" || outcome=$?
    umount /mnt && return $outcome
}

# bench NAMESPACE OPTIONS...
bench() {
    url="nvme+tcp://$host_address:$OCTOKV_PORT/$OCTOKV_NQN?nsid=$1"
    shift
    octokv bench --url "$url" --workload fillseq --key-size 16 --value-size "$OCTOKV_VALUE" \
        --threads "$OCTOKV_THREADS" --depth 1 --num $((OCTOKV_THREADS * OCTOKV_OPS)) --json - "$@"
}

step "connect"
run try_connect
await disk_of "$OCTOKV_FILES" || fail "no disk of namespace $OCTOKV_FILES appeared"
for round in $(echo "$OCTOKV_ROUNDS" | tr , ' '); do
    step "round $round"
    result a-sync rocksdb --sync=1
    result a rocksdb --sync=0
    result c bench "${round#*:}" --system remote-engine
    result d bench "${round%:*}"
done
