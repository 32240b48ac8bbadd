//! `octokv scan` through the binary: what it says when a node cannot do it.

use crate::common::{Server, temp_directory};

#[test]
fn a_namespace_whose_engine_has_no_order_is_named() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    server.put("key", "value");
    server.run(&["scan"]).assert_failed(1, &["scan: the namespace has no iterators", "octokv list"]);
    server.stop();
}
