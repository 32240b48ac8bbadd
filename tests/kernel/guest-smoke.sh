# shellcheck shell=dash
# The harness alone, without a target: nvme-cli runs in the guest, the fabrics driver is there, and a port
# where nobody listens is refused cleanly. Run by `tests/kernel/run --smoke`.
# shellcheck source=guest/lib.sh
. /lib.sh
# shellcheck source=tests/kernel/keys-lib.sh
. /keys-lib.sh

step "nvme-cli runs"
nvme version >/tmp/out 2>/tmp/err || fail "nvme version failed"
cat /tmp/out

step "the fabrics driver is there"
[ -c /dev/nvme-fabrics ] || fail "/dev/nvme-fabrics is missing"

step "the network reaches the host"
ping -c 1 -W 5 $host_address >/tmp/out 2>/tmp/err || fail "10.0.2.2 does not answer"

step "keys become the right dwords"
[ "$(key_fields hello)" = "--cdw2=0x6c6c6568 --cdw3=0x0000006f --cdw14=0x00000000 --cdw15=0x00000000 " ] ||
    fail "hello became $(key_fields hello)"

step "the processors and the values are there"
for mask in 2 3; do
    taskset -p $mask $$ >/dev/null || fail "two processors are needed"
done
for size in 100 4096 102400; do
    [ "$(stat -c %s "/data/$size")" = "$size" ] || fail "/data/$size has another size"
done

step "discover fails cleanly where nobody listens"
discover && fail "nvme discover succeeded at a closed port"
cat /tmp/err
grep -Eiq 'refused|failed' /tmp/out /tmp/err || fail "no reason was given"
