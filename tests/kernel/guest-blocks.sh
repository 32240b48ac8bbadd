# shellcheck shell=dash
# The second host: disks and file systems on block namespaces, the first host beside it, then everything that
# can happen to a connected host.
# shellcheck source=guest/lib.sh
. /lib.sh
# shellcheck source=tests/kernel/keys-lib.sh
. /keys-lib.sh
# shellcheck source=tests/kernel/blocks-lib.sh
. /blocks-lib.sh
# shellcheck source=tests/kernel/files.sh
. /files.sh

# The kernel tries again after one second when it loses the node.
connect -i 2 -c 1
# shellcheck source=tests/kernel/blocks.sh
. /blocks.sh
filled 2
disconnect

connect -i 2 -c 1 -g -G
filled 3
whole 2
# shellcheck source=tests/kernel/meet.sh
. /meet.sh
ask alone
# shellcheck source=tests/kernel/alive.sh
. /alive.sh
