//! The JSON of etcd's gateway: requests, responses and watch events, with revisions and leases relative to a base.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use octokv_cluster::etcd::{
    Compare, CompareResult, CompareTarget, EtcdError, EtcdRequest, EtcdResponse, KeyChange, KeyRange,
    KeyValue, LeaseId, LeaseTimeToLive, PutRequest, RangeEnd, RangeRequest, ResponseBody, Revision,
    TxnOperation, WatchEvent, WatchRequest,
};
use serde_json::{Value, json};

/// Bytes as JSON has them.
pub fn encode(bytes: &[u8]) -> String {
    BASE64_STANDARD.encode(bytes)
}

/// A field of bytes; an absent one is empty.
fn bytes(value: &Value) -> Vec<u8> {
    BASE64_STANDARD.decode(value.as_str().unwrap_or_default()).unwrap()
}

/// A field of 64 bits, which JSON has as text; an absent one is 0.
pub fn number(value: &Value) -> i64 {
    value.as_str().map_or(0, |text| text.parse().unwrap())
}

/// Translates between the API's types and its JSON; revisions and leases are relative to these.
#[derive(Clone, Copy)]
pub struct Codec {
    pub revision_base: u64,
    pub lease_base: i64,
}

impl Codec {
    pub fn revision(&self, value: &Value) -> Revision {
        match number(value) {
            0 => Revision(0),
            absolute => Revision(absolute as u64 - self.revision_base),
        }
    }

    fn encode_revision(&self, revision: Revision) -> String {
        (revision.0 + self.revision_base).to_string()
    }

    fn lease(&self, value: &Value) -> LeaseId {
        match number(value) {
            0 => LeaseId::NONE,
            absolute => LeaseId(absolute - self.lease_base),
        }
    }

    fn encode_lease(&self, lease: LeaseId) -> String {
        let absolute = if lease == LeaseId::NONE { 0 } else { lease.0 + self.lease_base };
        absolute.to_string()
    }

    pub fn encode_range(&self, range: &KeyRange) -> Value {
        match &range.end {
            RangeEnd::Single => json!({ "key": encode(&range.start) }),
            RangeEnd::Before(end) => json!({ "key": encode(&range.start), "range_end": encode(end) }),
            RangeEnd::Unbounded => json!({ "key": encode(&range.start), "range_end": encode(b"\0") }),
        }
    }

    fn encode_read(&self, request: &RangeRequest) -> Value {
        let mut value = self.encode_range(&request.range);
        if let Some(revision) = request.revision {
            value["revision"] = self.encode_revision(revision).into();
        }
        value["limit"] = request.limit.to_string().into();
        value["serializable"] = request.serializable.into();
        value["keys_only"] = request.keys_only.into();
        value["count_only"] = request.count_only.into();
        value
    }

    fn encode_put(&self, put: &PutRequest) -> Value {
        json!({
            "key": encode(&put.key), "value": encode(&put.value), "lease": self.encode_lease(put.lease),
            "prev_kv": put.with_previous,
        })
    }

    fn encode_compare(&self, compare: &Compare) -> Value {
        let mut value = self.encode_range(&compare.range);
        let (target, field, operand) = match &compare.target {
            CompareTarget::Version(version) => ("VERSION", "version", version.to_string()),
            CompareTarget::CreateRevision(revision) => {
                ("CREATE", "create_revision", self.encode_revision(*revision))
            }
            CompareTarget::ModRevision(revision) => ("MOD", "mod_revision", self.encode_revision(*revision)),
            CompareTarget::Value(value) => ("VALUE", "value", encode(value)),
            CompareTarget::Lease(lease) => ("LEASE", "lease", self.encode_lease(*lease)),
        };
        value["target"] = target.into();
        value[field] = operand.into();
        value["result"] = match compare.result {
            CompareResult::Equal => "EQUAL",
            CompareResult::NotEqual => "NOT_EQUAL",
            CompareResult::Greater => "GREATER",
            CompareResult::Less => "LESS",
        }
        .into();
        value
    }

    fn encode_operation(&self, operation: &TxnOperation) -> Value {
        match operation {
            TxnOperation::Range(range) => json!({ "request_range": self.encode_read(range) }),
            TxnOperation::Put(put) => json!({ "request_put": self.encode_put(put) }),
            TxnOperation::Delete(delete) => {
                let mut value = self.encode_range(&delete.range);
                value["prev_kv"] = delete.with_previous.into();
                json!({ "request_delete_range": value })
            }
        }
    }

    /// The method's path and the request.
    pub fn encode_request(&self, request: &EtcdRequest) -> (&'static str, Value) {
        match request {
            EtcdRequest::Range(range) => ("kv/range", self.encode_read(range)),
            EtcdRequest::Put(put) => ("kv/put", self.encode_put(put)),
            EtcdRequest::Delete(delete) => {
                let operation = TxnOperation::Delete(delete.clone());
                ("kv/deleterange", self.encode_operation(&operation)["request_delete_range"].take())
            }
            EtcdRequest::Txn(txn) => {
                let operations =
                    |branch: &[TxnOperation]| branch.iter().map(|one| self.encode_operation(one)).collect();
                let compare = txn.compare.iter().map(|compare| self.encode_compare(compare)).collect();
                let (success, failure): (Vec<Value>, Vec<Value>) =
                    (operations(&txn.success), operations(&txn.failure));
                let compare: Vec<Value> = compare;
                ("kv/txn", json!({ "compare": compare, "success": success, "failure": failure }))
            }
            EtcdRequest::LeaseGrant { lease, ttl_s } => {
                ("lease/grant", json!({ "ID": self.encode_lease(*lease), "TTL": ttl_s.to_string() }))
            }
            EtcdRequest::LeaseKeepAlive { lease } => {
                ("lease/keepalive", json!({ "ID": self.encode_lease(*lease) }))
            }
            EtcdRequest::LeaseRevoke { lease } => {
                ("lease/revoke", json!({ "ID": self.encode_lease(*lease) }))
            }
            EtcdRequest::LeaseTimeToLive { lease } => {
                ("lease/timetolive", json!({ "ID": self.encode_lease(*lease), "keys": true }))
            }
            EtcdRequest::Compact { revision } => {
                ("kv/compaction", json!({ "revision": self.encode_revision(*revision), "physical": true }))
            }
        }
    }

    fn key_value(&self, value: &Value) -> KeyValue {
        KeyValue {
            key: bytes(&value["key"]),
            create_revision: self.revision(&value["create_revision"]),
            mod_revision: self.revision(&value["mod_revision"]),
            version: number(&value["version"]) as u64,
            value: bytes(&value["value"]),
            lease: self.lease(&value["lease"]),
        }
    }

    fn optional_key_value(&self, value: &Value) -> Option<KeyValue> {
        value.is_object().then(|| self.key_value(value))
    }

    fn key_values(&self, value: &Value) -> Vec<KeyValue> {
        value.as_array().into_iter().flatten().map(|kv| self.key_value(kv)).collect()
    }

    fn read_body(&self, value: &Value) -> ResponseBody {
        ResponseBody::Range {
            kvs: self.key_values(&value["kvs"]),
            more: value["more"].as_bool().unwrap_or(false),
            count: number(&value["count"]) as u64,
        }
    }

    fn put_body(&self, value: &Value) -> ResponseBody {
        ResponseBody::Put { previous: self.optional_key_value(&value["prev_kv"]) }
    }

    fn delete_body(&self, value: &Value) -> ResponseBody {
        let previous = self.key_values(&value["prev_kvs"]);
        ResponseBody::Deleted { count: number(&value["deleted"]) as u64, previous }
    }

    pub fn response(&self, request: &EtcdRequest, value: &Value) -> Result<EtcdResponse, EtcdError> {
        let value = if value["result"].is_object() { &value["result"] } else { value };
        let body = match request {
            EtcdRequest::Range(_) => self.read_body(value),
            EtcdRequest::Put(_) => self.put_body(value),
            EtcdRequest::Delete(_) => self.delete_body(value),
            EtcdRequest::Txn(_) => ResponseBody::Txn {
                succeeded: value["succeeded"].as_bool().unwrap_or(false),
                bodies: value["responses"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .map(|response| match response.as_object().and_then(|fields| fields.iter().next()) {
                        Some((kind, value)) if kind == "response_range" => self.read_body(value),
                        Some((kind, value)) if kind == "response_put" => self.put_body(value),
                        Some((_, value)) => self.delete_body(value),
                        None => panic!("an empty response: {value}"),
                    })
                    .collect(),
            },
            // The response to a keep-alive of no lease has no time.
            EtcdRequest::LeaseKeepAlive { .. } if number(&value["TTL"]) == 0 => {
                return Err(EtcdError::LeaseNotFound);
            }
            EtcdRequest::LeaseGrant { .. } | EtcdRequest::LeaseKeepAlive { .. } => {
                ResponseBody::Lease { lease: self.lease(&value["ID"]), ttl_s: number(&value["TTL"]) }
            }
            EtcdRequest::LeaseRevoke { .. } => ResponseBody::Revoked,
            EtcdRequest::LeaseTimeToLive { .. } => {
                let mut keys: Vec<_> = value["keys"].as_array().into_iter().flatten().map(bytes).collect();
                keys.sort();
                let (remaining_s, granted_ttl_s) = (number(&value["TTL"]), number(&value["grantedTTL"]));
                ResponseBody::TimeToLive((remaining_s >= 0).then_some(LeaseTimeToLive {
                    granted_ttl_s,
                    remaining_s,
                    keys,
                }))
            }
            EtcdRequest::Compact { .. } => ResponseBody::Compacted,
        };
        Ok(EtcdResponse { revision: self.revision(&value["header"]["revision"]), body })
    }

    pub fn event(&self, value: &Value) -> WatchEvent {
        let kv = self.key_value(&value["kv"]);
        let change = match value["type"].as_str() {
            Some("DELETE") => KeyChange::Delete { key: kv.key, revision: kv.mod_revision },
            _ => KeyChange::Put(kv),
        };
        WatchEvent { change, previous: self.optional_key_value(&value["prev_kv"]) }
    }

    pub fn encode_watch(&self, request: &WatchRequest) -> Value {
        let mut value = self.encode_range(&request.range);
        if let Some(revision) = request.start_revision {
            value["start_revision"] = self.encode_revision(revision).into();
        }
        value["prev_kv"] = request.with_previous.into();
        value
    }
}

pub fn error_of(message: &str) -> EtcdError {
    let errors = [
        ("has been compacted", EtcdError::Compacted),
        ("is a future revision", EtcdError::FutureRevision),
        ("key is not provided", EtcdError::EmptyKey),
        ("duplicate key given", EtcdError::DuplicateKey),
        ("too many operations", EtcdError::TooManyOperations),
        ("requested lease not found", EtcdError::LeaseNotFound),
        ("lease already exists", EtcdError::LeaseExists),
        ("too large lease TTL", EtcdError::LeaseTtlTooLarge),
    ];
    let found = errors.iter().find(|(text, _)| message.contains(text));
    found.unwrap_or_else(|| panic!("an error without a translation: {message}")).1
}
