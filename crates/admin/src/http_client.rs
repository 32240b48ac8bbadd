//! The other side of the door: one request, one answer, for the command line.

use crate::api_types::ErrorBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a node may take for an answer: long enough to open a large volume.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(300);

/// Why there is no answer that was hoped for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminClientError {
    /// Nobody answers at the socket.
    Unreachable(PathBuf, String),
    /// The node said why not.
    Status(u16, String),
    /// What came back is no answer of a node.
    InvalidResponse(String),
}

impl fmt::Display for AdminClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AdminClientError::Unreachable(path, why) => {
                write!(f, "no node answers at the administration socket {}: {why}", path.display())
            }
            AdminClientError::Status(_, why) => f.write_str(why),
            AdminClientError::InvalidResponse(what) => {
                write!(f, "the answer is none of an octokv node: {what}")
            }
        }
    }
}

impl std::error::Error for AdminClientError {}

/// A part of a path, from any text.
pub fn encode_path_segment(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

/// Asks for a document.
///
/// # Errors
/// See [`AdminClientError`].
pub fn get<T: DeserializeOwned>(socket: &Path, path: &str) -> Result<T, AdminClientError> {
    send(socket, Method::GET, path, None)
}

/// Adds a document, and gives what was made of it.
///
/// # Errors
/// See [`AdminClientError`].
pub fn post<T: DeserializeOwned>(
    socket: &Path,
    path: &str,
    body: &impl Serialize,
) -> Result<T, AdminClientError> {
    send(socket, Method::POST, path, Some(encode_json(body)?))
}

/// Puts something in its place.
///
/// # Errors
/// See [`AdminClientError`].
pub fn put(socket: &Path, path: &str, body: Option<&impl Serialize>) -> Result<(), AdminClientError> {
    send(socket, Method::PUT, path, body.map(encode_json).transpose()?)
}

/// Takes something away.
///
/// # Errors
/// See [`AdminClientError`].
pub fn delete(socket: &Path, path: &str) -> Result<(), AdminClientError> {
    send(socket, Method::DELETE, path, None)
}

fn encode_json(body: &impl Serialize) -> Result<Vec<u8>, AdminClientError> {
    serde_json::to_vec(body).map_err(|error| AdminClientError::InvalidResponse(error.to_string()))
}

fn send<T: DeserializeOwned>(
    socket: &Path,
    method: Method,
    path: &str,
    body: Option<Vec<u8>>,
) -> Result<T, AdminClientError> {
    let unreachable =
        |why: &dyn fmt::Display| AdminClientError::Unreachable(socket.to_owned(), why.to_string());
    let garbled = |why: &dyn fmt::Display| AdminClientError::InvalidResponse(why.to_string());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = runtime.map_err(|error| unreachable(&error))?;
    let exchange = async {
        let stream = tokio::net::UnixStream::connect(socket).await.map_err(|error| unreachable(&error))?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| unreachable(&error))?;
        let connection = tokio::spawn(connection);
        let mut request = Request::builder().method(method).uri(path).header("host", "octokv");
        if body.is_some() {
            request = request.header("content-type", "application/json");
        }
        let request = request.body(Full::new(Bytes::from(body.unwrap_or_default())));
        let response = sender.send_request(request.map_err(|error| garbled(&error))?).await;
        let response = response.map_err(|error| unreachable(&error))?;
        let status = response.status();
        let bytes = response.into_body().collect().await.map_err(|error| garbled(&error))?.to_bytes();
        connection.abort();
        if !status.is_success() {
            let problem: ErrorBody = serde_json::from_slice(&bytes)
                .map_err(|_| garbled(&format!("{status} {}", String::from_utf8_lossy(&bytes))))?;
            return Err(AdminClientError::Status(status.as_u16(), problem.error));
        }
        serde_json::from_slice(&bytes).map_err(|error| garbled(&error))
    };
    runtime.block_on(async {
        let late = |_| unreachable(&"no answer in time");
        tokio::time::timeout(RESPONSE_TIMEOUT, exchange).await.map_err(late)?
    })
}
