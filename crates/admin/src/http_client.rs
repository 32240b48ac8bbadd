//! HTTP client of the admin socket for the command line: one request and one response per call.

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

/// Maximum time of most requests: enough to open a large volume.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(300);

/// A failed admin request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdminClientError {
    /// No node accepts connections at the socket, or it did not respond.
    #[error("no node responds at the admin socket {}: {}", .0.display(), .1)]
    Unreachable(PathBuf, String),
    /// The node's error response: HTTP status and message.
    #[error("{1}")]
    Status(u16, String),
    /// The response is not an admin document.
    #[error("invalid response from the node: {0}")]
    InvalidResponse(String),
}

/// Percent-encodes a text as one path segment.
pub fn encode_path_segment(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

/// Reads a document.
///
/// # Errors
/// See [`AdminClientError`].
pub fn get<T: DeserializeOwned>(socket: &Path, path: &str) -> Result<T, AdminClientError> {
    send(socket, Method::GET, path, None)
}

/// Creates a resource and returns its document.
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

/// Asks for work of any length, and returns the document of its result.
///
/// # Errors
/// See [`AdminClientError`]; there is no time limit.
pub fn run<T: DeserializeOwned>(socket: &Path, path: &str) -> Result<T, AdminClientError> {
    send_within(Duration::MAX, socket, Method::POST, path, None)
}

/// Creates or replaces a resource.
///
/// # Errors
/// See [`AdminClientError`].
pub fn put(socket: &Path, path: &str, body: Option<&impl Serialize>) -> Result<(), AdminClientError> {
    send(socket, Method::PUT, path, body.map(encode_json).transpose()?)
}

/// Deletes a resource.
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
    send_within(RESPONSE_TIMEOUT, socket, method, path, body)
}

fn send_within<T: DeserializeOwned>(
    time_limit: Duration,
    socket: &Path,
    method: Method,
    path: &str,
    body: Option<Vec<u8>>,
) -> Result<T, AdminClientError> {
    let unreachable =
        |why: &dyn fmt::Display| AdminClientError::Unreachable(socket.to_owned(), why.to_string());
    let invalid = |why: &dyn fmt::Display| AdminClientError::InvalidResponse(why.to_string());
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
        let response = sender.send_request(request.map_err(|error| invalid(&error))?).await;
        let response = response.map_err(|error| unreachable(&error))?;
        let status = response.status();
        let bytes = response.into_body().collect().await.map_err(|error| invalid(&error))?.to_bytes();
        connection.abort();
        if !status.is_success() {
            let problem: ErrorBody = serde_json::from_slice(&bytes)
                .map_err(|_| invalid(&format!("{status} {}", String::from_utf8_lossy(&bytes))))?;
            return Err(AdminClientError::Status(status.as_u16(), problem.error));
        }
        serde_json::from_slice(&bytes).map_err(|error| invalid(&error))
    };
    runtime.block_on(async {
        let timed_out = |_| unreachable(&"timed out");
        tokio::time::timeout(time_limit, exchange).await.map_err(timed_out)?
    })
}
