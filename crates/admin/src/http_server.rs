//! Admin server: HTTP/1.1 with JSON on a Unix socket with mode 0600, on its own thread.
//!
//! In: requests with documents of [`crate::api_types`]. Out: the responses of [`AdminService`]. Nothing here runs on a
//! data core.

use crate::api_types::{AddDevice, AddNamespace, ErrorBody, NamespaceSummary, ReplaceDevice, SetAnaState};
use crate::scheduling_api::{
    RENAMED_PATHS, SCHEDULING_INTERVAL_PATH, SCHEDULING_PATH, SchedConfigPatch, renamed_setting,
    unknown_field,
};
use crate::service::{AdminError, AdminService};
use axum::extract::rejection::JsonRejection;
use axum::extract::{Path as InPath, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, delete, get, post, put};
use axum::{Json, Router};
use octokv_base::NamespaceId;
use octokv_node::CompactionStartError;
use serde::Serialize;
use std::convert::Infallible;
use std::fmt;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::net::{UnixListener, UnixSocket};
use tokio::sync::{oneshot, watch};

/// Maximum time of the requests in progress at shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval of updates of the health log, and updates per save of the state file.
const HEALTH_UPDATE_INTERVAL: Duration = Duration::from_secs(30);
const UPDATES_PER_STATE_SAVE: u32 = 20;
/// Interval of checks for failed devices.
const DEVICE_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Connections that the kernel queues before they are accepted.
const BACKLOG_MAX: u32 = 128;
/// Threads for calls that block on data cores and devices, and the idle time after which one ends.
const BLOCKING_THREADS_MAX: usize = 2;
const BLOCKING_THREAD_KEEP_ALIVE: Duration = Duration::from_secs(2);
/// The time that requests in progress have to end when the node stops.
const REQUESTS_END_TIMEOUT: Duration = Duration::from_secs(30);

/// The thread beside the data cores, until this is dropped: the admin socket, if configured, and updates of the health
/// log.
pub struct AdminServer {
    path: Option<PathBuf>,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl AdminServer {
    /// Starts the thread, with a socket at a path or without one. The stale socket of a killed node is replaced.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] if another node accepts connections at the path, [`io::ErrorKind::AlreadyExists`]
    /// if the path is not a socket, or the error of creating the socket or the thread.
    pub fn start(path: Option<&Path>, service: Arc<AdminService>) -> io::Result<AdminServer> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .max_blocking_threads(BLOCKING_THREADS_MAX)
            .thread_keep_alive(BLOCKING_THREAD_KEEP_ALIVE)
            .thread_name("octokv-admin-io")
            .build()?;
        let listener = path.map(bind_socket).transpose()?.map(|socket| {
            let _context = runtime.enter();
            socket.listen(BACKLOG_MAX)
        });
        let listener = listener.transpose()?;
        let (stop, stopped) = watch::channel(false);
        let body = move || {
            if let Err(error) = runtime.block_on(serve(listener, service, stopped)) {
                tracing::error!(%error, "the admin socket failed");
            }
            // A request whose device hangs does not keep the node from stopping.
            runtime.shutdown_timeout(REQUESTS_END_TIMEOUT);
        };
        let thread = std::thread::Builder::new().name("octokv-admin".to_owned()).spawn(body)?;
        Ok(AdminServer { path: path.map(Path::to_owned), stop, thread: Some(thread) })
    }
}

/// Creates a socket file with mode 0600. The mode is set before the socket listens: until then the kernel rejects every
/// connection, so no other user can connect in between.
fn bind_socket(path: &Path) -> io::Result<UnixSocket> {
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent)?;
    }
    if path.exists() {
        if UnixStream::connect(path).is_ok() {
            return Err(io::Error::new(io::ErrorKind::AddrInUse, "another node uses it"));
        }
        remove_socket(path)?;
    }
    let socket = UnixSocket::new_stream()?;
    socket.bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(socket)
}

/// Removes a socket and nothing else: a mistyped path may name the user's file.
fn remove_socket(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileTypeExt;
    if !std::fs::metadata(path)?.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the path exists and is not a socket"));
    }
    std::fs::remove_file(path)
}

impl Drop for AdminServer {
    fn drop(&mut self) {
        // No new connection is possible; requests in progress are completed.
        let _ = self.path.as_deref().map(remove_socket);
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn serve(
    listener: Option<UnixListener>,
    service: Arc<AdminService>,
    stopped: watch::Receiver<bool>,
) -> io::Result<()> {
    let wait_for_stop = |mut stopped: watch::Receiver<bool>| async move {
        // An error means that the server itself was dropped.
        let _ = stopped.wait_for(|stop| *stop).await;
    };
    let health_updates = update_health(Arc::clone(&service));
    let until = wait_for_stop(stopped.clone());
    let server = async move {
        match listener {
            Some(listener) => axum::serve(listener, router(service)).with_graceful_shutdown(until).await,
            None => {
                until.await;
                Ok(())
            }
        }
    };
    let grace_period = async {
        wait_for_stop(stopped).await;
        tokio::time::sleep(SHUTDOWN_TIMEOUT).await;
    };
    tokio::select! {
        served = server => served,
        // An idle connection does not delay the shutdown.
        () = grace_period => Ok(()),
        never = health_updates => match never {},
    }
}

/// Updates the health log, at once if a device has failed, and every [`UPDATES_PER_STATE_SAVE`] times the state file, until the server stops.
async fn update_health(service: Arc<AdminService>) -> Infallible {
    let mut updates = 0_u32;
    loop {
        let next_update = Instant::now() + HEALTH_UPDATE_INTERVAL;
        while !service.node().log_device_failures() && Instant::now() < next_update {
            tokio::time::sleep(DEVICE_CHECK_INTERVAL).await;
        }
        updates = updates.wrapping_add(1);
        let save = updates.is_multiple_of(UPDATES_PER_STATE_SAVE);
        let service = Arc::clone(&service);
        // A core that does not respond now is tried again at the next update.
        let _ = tokio::task::spawn_blocking(move || service.update_health(save)).await;
    }
}

type ServiceState = State<Arc<AdminService>>;

fn router(service: Arc<AdminService>) -> Router {
    let renamed = RENAMED_PATHS.iter().fold(Router::new(), |router, (old, new)| {
        router.route(old, any(async move || gone_response(old, new)))
    });
    renamed
        .route("/v1/namespaces", get(namespaces).post(add_namespace))
        .route("/v1/namespaces/{nsid}", delete(remove_namespace))
        .route("/v1/namespaces/{nsid}/compact", post(compact_namespace))
        .route("/v1/namespaces/{nsid}/replace", post(replace_device))
        .route("/v1/namespaces/{nsid}/extend", post(add_device))
        .route("/v1/hosts", get(hosts))
        .route("/v1/hosts/{name}", put(allow_host).delete(deny_host))
        .route("/v1/ana", get(ana_groups))
        .route("/v1/ana/{group}", put(set_ana_state))
        .route(SCHEDULING_PATH, get(scheduling).put(set_scheduling))
        .route(SCHEDULING_INTERVAL_PATH, get(last_interval))
        .route("/v1/statistics", get(status))
        .fallback(async || error_response(&AdminError::NotFound("unknown path".to_owned())))
        .with_state(service)
}

fn error_response(error: &AdminError) -> Response {
    let status = match error {
        AdminError::Invalid(_) => StatusCode::BAD_REQUEST,
        AdminError::NotFound(_) => StatusCode::NOT_FOUND,
        AdminError::AlreadyExists(_) => StatusCode::CONFLICT,
        AdminError::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
    };
    (status, Json(ErrorBody { error: error.to_string() })).into_response()
}

/// 410 Gone with the present path: a client of the former version must not take it for an interval that has not ended.
fn gone_response(old: &str, new: &str) -> Response {
    let error = format!("{old} is now {new}, and its fields have other names");
    (StatusCode::GONE, Json(ErrorBody { error })).into_response()
}

/// 400 Bad Request for a body that is not the expected document; a former field name is reported with the present one.
fn invalid_body_response(rejection: &JsonRejection) -> Response {
    let text = rejection.body_text();
    let renamed = unknown_field(&text).and_then(|old| Some((old, renamed_setting(old)?)));
    let error = match renamed {
        Some((old, new)) => format!("\"{old}\" is now \"{new}\""),
        None => text,
    };
    error_response(&AdminError::Invalid(error))
}

/// Runs a call that may block on data cores and devices, on another thread than the server's.
async fn run_blocking<T: Serialize + Send + 'static>(
    service: Arc<AdminService>,
    work: impl FnOnce(&AdminService) -> Result<T, AdminError> + Send + 'static,
) -> Response {
    match tokio::task::spawn_blocking(move || work(&service)).await {
        Ok(Ok(value)) => Json(value).into_response(),
        Ok(Err(error)) => error_response(&error),
        Err(error) => error_response(&AdminError::Failed(error.to_string())),
    }
}

async fn namespaces(State(service): ServiceState) -> Response {
    run_blocking(service, |service| Ok(service.namespaces())).await
}

async fn add_namespace(
    State(service): ServiceState,
    request: Result<Json<AddNamespace>, JsonRejection>,
) -> Response {
    match request {
        Ok(Json(request)) => run_blocking(service, move |service| service.add_namespace(&request)).await,
        Err(rejection) => invalid_body_response(&rejection),
    }
}

async fn remove_namespace(State(service): ServiceState, InPath(nsid): InPath<u32>) -> Response {
    run_blocking(service, move |service| service.remove_namespace(nsid)).await
}

async fn replace_device(
    State(service): ServiceState,
    InPath(nsid): InPath<u32>,
    request: Result<Json<ReplaceDevice>, JsonRejection>,
) -> Response {
    match request {
        Ok(Json(request)) => {
            run_blocking(service, move |service| service.replace_device(nsid, &request)).await
        }
        Err(rejection) => invalid_body_response(&rejection),
    }
}

async fn add_device(
    State(service): ServiceState,
    InPath(nsid): InPath<u32>,
    request: Result<Json<AddDevice>, JsonRejection>,
) -> Response {
    match request {
        Ok(Json(request)) => run_blocking(service, move |service| service.add_device(nsid, &request)).await,
        Err(rejection) => invalid_body_response(&rejection),
    }
}

/// Responds when the compaction has ended, without a thread that waits for it.
async fn compact_namespace(State(service): ServiceState, InPath(nsid): InPath<u32>) -> Response {
    let (ended_tx, ended) = oneshot::channel();
    let node_service = Arc::clone(&service);
    let begun = tokio::task::spawn_blocking(move || {
        let on_compacted = Box::new(move |result| {
            let _ = ended_tx.send(result);
        });
        node_service.node().compact(NamespaceId(nsid), on_compacted)
    });
    let failed = |why: &dyn fmt::Display| {
        error_response(&AdminError::Failed(format!("namespace {nsid}: compaction: {why}")))
    };
    match begun.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => return error_response(&compaction_error(error)),
        Err(error) => return failed(&error),
    }
    match ended.await {
        Ok(Ok(())) => run_blocking(service, move |service| namespace_of(service, nsid)).await,
        Ok(Err(error)) => failed(&error),
        Err(_) => failed(&"the namespace was removed, or the node stopped, before it ended"),
    }
}

fn namespace_of(service: &AdminService, nsid: u32) -> Result<NamespaceSummary, AdminError> {
    let found = service.namespaces().into_iter().find(|one| one.nsid == nsid);
    found.ok_or_else(|| AdminError::NotFound(format!("namespace {nsid} does not exist")))
}

fn compaction_error(error: CompactionStartError) -> AdminError {
    let why = error.to_string();
    match error {
        CompactionStartError::Missing(_) => AdminError::NotFound(why),
        CompactionStartError::Blocks(_) => AdminError::Invalid(why),
        CompactionStartError::InProgress(_) => AdminError::AlreadyExists(why),
        CompactionStartError::Stopping => AdminError::Failed(why),
    }
}

async fn hosts(State(service): ServiceState) -> Response {
    run_blocking(service, |service| Ok(service.hosts())).await
}

async fn allow_host(State(service): ServiceState, InPath(name): InPath<String>) -> Response {
    run_blocking(service, move |service| service.allow_host(&name)).await
}

async fn deny_host(State(service): ServiceState, InPath(name): InPath<String>) -> Response {
    run_blocking(service, move |service| service.deny_host(&name)).await
}

async fn ana_groups(State(service): ServiceState) -> Response {
    run_blocking(service, |service| Ok(service.ana_groups())).await
}

async fn set_ana_state(
    State(service): ServiceState,
    InPath(group): InPath<u32>,
    change: Result<Json<SetAnaState>, JsonRejection>,
) -> Response {
    match change {
        Ok(Json(SetAnaState { state })) => {
            run_blocking(service, move |service| service.set_ana_state(group, &state)).await
        }
        Err(rejection) => invalid_body_response(&rejection),
    }
}

async fn scheduling(State(service): ServiceState) -> Response {
    run_blocking(service, |service| Ok(service.scheduling())).await
}

async fn set_scheduling(
    State(service): ServiceState,
    change: Result<Json<SchedConfigPatch>, JsonRejection>,
) -> Response {
    match change {
        Ok(Json(change)) => run_blocking(service, move |service| service.set_scheduling(change)).await,
        Err(rejection) => invalid_body_response(&rejection),
    }
}

async fn last_interval(State(service): ServiceState) -> Response {
    run_blocking(service, |service| service.last_interval()).await
}

async fn status(State(service): ServiceState) -> Response {
    run_blocking(service, |service| Ok(service.status())).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_has_mode_0600_before_it_accepts_connections() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("below/admin.sock");
        let socket = bind_socket(&path).unwrap();
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(), 0o600);
        let refused = UnixStream::connect(&path).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        let _context = runtime.enter();
        let _listener = socket.listen(BACKLOG_MAX).unwrap();
        assert_eq!(mode(), 0o600);
        UnixStream::connect(&path).unwrap();
        assert_eq!(bind_socket(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }
}
