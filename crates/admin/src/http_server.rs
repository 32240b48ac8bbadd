//! The door: HTTP/1.1 with JSON on a Unix socket that its owner alone may open, on a thread of its own.
//!
//! In: requests of [`crate::words`]. Out: the [`AdminService`]'s answers. Nothing here runs on a data core.

use crate::api_types::{AddNamespace, ErrorBody, SetAnaState};
use crate::scheduling_api::{
    RENAMED_PATHS, SCHEDULING_INTERVAL_PATH, SCHEDULING_PATH, SchedConfigPatch, renamed_setting,
    unknown_field,
};
use crate::service::{AdminError, AdminService};
use axum::extract::rejection::JsonRejection;
use axum::extract::{Path as InPath, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, delete, get, put};
use axum::{Json, Router};
use serde::Serialize;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::watch;

/// How long what was begun may take when the door closes.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);
/// How often the health log is told how the node is, and how many times as rarely the state file.
const HEALTH_UPDATE_INTERVAL: Duration = Duration::from_secs(30);
const UPDATES_PER_STATE_SAVE: u32 = 20;
/// Threads that wait for data cores and devices in the place of the door's own, and how long one stays without work.
const BLOCKING_THREADS_MAX: usize = 2;
const BLOCKING_THREAD_KEEP_ALIVE: Duration = Duration::from_secs(2);

/// What runs beside the data cores until this is dropped: the door, where there is one, and notes on the node's
/// health.
pub struct AdminServer {
    path: Option<PathBuf>,
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
}

impl AdminServer {
    /// Begins, with the door at a path, or without one. A socket that a node left there when it was killed is replaced; one that somebody
    /// answers on is not.
    ///
    /// # Errors
    /// What is in the way.
    pub fn start(path: Option<&Path>, service: Arc<AdminService>) -> io::Result<AdminServer> {
        let listener = path.map(bind_socket).transpose()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .max_blocking_threads(BLOCKING_THREADS_MAX)
            .thread_keep_alive(BLOCKING_THREAD_KEEP_ALIVE)
            .thread_name("octokv-wait")
            .build()?;
        let (stop, stopped) = watch::channel(false);
        let body = move || {
            if let Err(error) = runtime.block_on(serve(listener, service, stopped)) {
                tracing::error!(%error, "the administration socket is closed");
            }
        };
        let thread = std::thread::Builder::new().name("octokv-admin".to_owned()).spawn(body)?;
        Ok(AdminServer { path: path.map(Path::to_owned), stop, thread: Some(thread) })
    }
}

fn bind_socket(path: &Path) -> io::Result<UnixListener> {
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent)?;
    }
    if path.exists() {
        if UnixStream::connect(path).is_ok() {
            return Err(io::Error::new(io::ErrorKind::AddrInUse, "another node answers there"));
        }
        remove_socket(path)?;
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Removes a socket, and nothing else: a path that was mistyped may name a file of somebody's.
fn remove_socket(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileTypeExt;
    if !std::fs::metadata(path)?.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "there is something that is no socket"));
    }
    std::fs::remove_file(path)
}

impl Drop for AdminServer {
    fn drop(&mut self) {
        // Nobody can connect any more; what was begun is answered.
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
        // An error means that the door itself is gone.
        let _ = stopped.wait_for(|stop| *stop).await;
    };
    let health_service = Arc::clone(&service);
    let health_updates = async move {
        for count in 1_u32.. {
            tokio::time::sleep(HEALTH_UPDATE_INTERVAL).await;
            let health_service = Arc::clone(&health_service);
            // A core that does not answer now is asked again the next time.
            let _ = tokio::task::spawn_blocking(move || {
                health_service.update_health(count % UPDATES_PER_STATE_SAVE == 0)
            })
            .await;
        }
    };
    let listener = listener.map(tokio::net::UnixListener::from_std).transpose()?;
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
        // Whoever holds a connection open and says nothing does not hold the node.
        () = grace_period => Ok(()),
        () = health_updates => Ok(()),
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
        .route("/v1/hosts", get(hosts))
        .route("/v1/hosts/{name}", put(allow_host).delete(deny_host))
        .route("/v1/ana", get(ana_groups))
        .route("/v1/ana/{group}", put(set_ana_state))
        .route(SCHEDULING_PATH, get(scheduling).put(set_scheduling))
        .route(SCHEDULING_INTERVAL_PATH, get(last_interval))
        .route("/v1/statistics", get(status))
        .fallback(async || error_response(&AdminError::NotFound("there is no such path".to_owned())))
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

/// Does something that may wait for data cores and devices, away from the thread that answers others.
async fn run_blocking<T: Serialize + Send + 'static>(
    service: Arc<AdminService>,
    work: impl FnOnce(&AdminService) -> Result<T, AdminError> + Send + 'static,
) -> Response {
    match tokio::task::spawn_blocking(move || work(&service)).await {
        Ok(Ok(found)) => Json(found).into_response(),
        Ok(Err(error)) => error_response(&error),
        Err(error) => error_response(&AdminError::Failed(error.to_string())),
    }
}

async fn namespaces(State(operator): ServiceState) -> Response {
    run_blocking(operator, |operator| Ok(operator.namespaces())).await
}

async fn add_namespace(
    State(operator): ServiceState,
    request: Result<Json<AddNamespace>, JsonRejection>,
) -> Response {
    match request {
        Ok(Json(asked)) => run_blocking(operator, move |operator| operator.add_namespace(&asked)).await,
        Err(rejection) => invalid_body_response(&rejection),
    }
}

async fn remove_namespace(State(operator): ServiceState, InPath(nsid): InPath<u32>) -> Response {
    run_blocking(operator, move |operator| operator.remove_namespace(nsid)).await
}

async fn hosts(State(operator): ServiceState) -> Response {
    run_blocking(operator, |operator| Ok(operator.hosts())).await
}

async fn allow_host(State(operator): ServiceState, InPath(name): InPath<String>) -> Response {
    run_blocking(operator, move |operator| operator.allow_host(&name)).await
}

async fn deny_host(State(operator): ServiceState, InPath(name): InPath<String>) -> Response {
    run_blocking(operator, move |operator| operator.deny_host(&name)).await
}

async fn ana_groups(State(operator): ServiceState) -> Response {
    run_blocking(operator, |operator| Ok(operator.ana_groups())).await
}

async fn set_ana_state(
    State(operator): ServiceState,
    InPath(group): InPath<u32>,
    change: Result<Json<SetAnaState>, JsonRejection>,
) -> Response {
    match change {
        Ok(Json(SetAnaState { state })) => {
            run_blocking(operator, move |operator| operator.set_ana_state(group, &state)).await
        }
        Err(rejection) => invalid_body_response(&rejection),
    }
}

async fn scheduling(State(operator): ServiceState) -> Response {
    run_blocking(operator, |operator| Ok(operator.scheduling())).await
}

async fn set_scheduling(
    State(operator): ServiceState,
    change: Result<Json<SchedConfigPatch>, JsonRejection>,
) -> Response {
    match change {
        Ok(Json(change)) => run_blocking(operator, move |operator| operator.set_scheduling(change)).await,
        Err(rejection) => invalid_body_response(&rejection),
    }
}

async fn last_interval(State(operator): ServiceState) -> Response {
    run_blocking(operator, |operator| operator.last_interval()).await
}

async fn status(State(operator): ServiceState) -> Response {
    run_blocking(operator, |operator| Ok(operator.status())).await
}
