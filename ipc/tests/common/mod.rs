//! Test support: an echo service, in this process or in one of its own.

use poolfs_ipc::service::{
    Acquired, Admission, CoreGroups, Endpoint, EndpointConfig, Reception, Recheck, Search, Session, Stop, Summoned,
    wait_for_doorbells,
};
use poolfs_ipc::wire::{Operation, Reply, Request};
use poolfs_ipc::{Connection, wire};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What the service says of its mounts.
pub const DEVICE: [u32; 2] = [0, 77];

/// One post, as it was served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    pub handle: u64,
    pub offset: u64,
    pub number: u64,
    pub data: Vec<u8>,
}

/// What was posted, in the order in which it was served: one lock for all slots.
#[derive(Default)]
pub struct Posts(Mutex<Vec<Written>>);

impl Posts {
    /// Serves what is posted in a slot.
    pub fn take(&self, session: &Arc<Session<()>>, slot: usize) {
        let mut all = self.0.lock().expect("not poisoned");
        for post in session.take_posts(slot) {
            let request = *post.request();
            let mut data = vec![0; usize::try_from(request.length).expect("within the data area")];
            post.get_data(0, &mut data).expect("within the data area");
            all.push(Written { handle: request.handle, offset: request.offset, number: request.second_offset, data });
            post.finish(&Reply { value: request.offset, length: request.length, ..Reply::default() });
        }
    }

    /// What has been served so far.
    pub fn all(&self) -> Vec<Written> {
        self.0.lock().expect("not poisoned").clone()
    }

    /// All the bytes of it.
    pub fn bytes(&self) -> Vec<u8> {
        self.all().into_iter().flat_map(|written| written.data).collect()
    }
}

pub struct EchoService {
    pub endpoint: Arc<Endpoint<()>>,
    pub posts: Arc<Posts>,
    socket: PathBuf,
    stop: Stop,
    ending: Arc<(AtomicBool, AtomicU32)>,
    threads: Vec<JoinHandle<()>>,
}

/// Sleeping requests: `mode` milliseconds.
fn serve(acquired: Acquired<()>, search: impl FnOnce() -> Search<()>) -> Option<Search<()>> {
    let request = *acquired.request();
    let mut data = vec![0; request.path_length as usize];
    if acquired.get_data(0, &mut data).is_err() {
        return None;
    }
    std::thread::sleep(Duration::from_millis(u64::from(request.mode)));
    data.reverse();
    acquired.put_data(0, &data).expect("as long as before");
    let searching = search();
    acquired.finish(&Reply { value: request.offset, length: data.len() as u64, ..Reply::default() });
    Some(searching)
}

impl EchoService {
    pub fn start(socket: &Path, threads: usize, adjust: impl FnOnce(&mut EndpointConfig)) -> Self {
        Self::start_looking(socket, threads, adjust, || None)
    }

    /// The same with what `recheck` returns for each client that is let in: what is asked whether it still is what it was.
    pub fn start_looking(
        socket: &Path,
        threads: usize,
        adjust: impl FnOnce(&mut EndpointConfig),
        recheck: impl Fn() -> Option<Recheck> + Send + 'static,
    ) -> Self {
        let mut config = EndpointConfig::new(CoreGroups::of_cpus(&[0, 1]));
        adjust(&mut config);
        let endpoint = Arc::new(Endpoint::new(config).expect("endpoint"));
        let posts = Arc::new(Posts::default());
        let reception = Reception::bind(socket, Arc::clone(&endpoint)).expect("socket");
        let stop = reception.stop();
        let ending = Arc::new((AtomicBool::new(false), AtomicU32::new(0)));
        let mut handles = vec![std::thread::spawn(move || {
            reception.run(|_| Ok(Admission { content: (), device: DEVICE, recheck: recheck() })).expect("reception")
        })];
        for group in 0..endpoint.groups().count() {
            for _ in 0..threads {
                let (endpoint, ending, posts) = (Arc::clone(&endpoint), Arc::clone(&ending), Arc::clone(&posts));
                handles.push(std::thread::spawn(move || {
                    let endpoints = [Arc::clone(&endpoint)];
                    let limit = Duration::from_secs(1);
                    let mut searching = None;
                    while !ending.0.load(Ordering::Acquire) {
                        let taken = endpoint.take(group);
                        let search = searching.take();
                        let Some(summoned) = taken else {
                            wait_for_doorbells(&endpoints, group, &ending.1, 0, limit, search);
                            continue;
                        };
                        drop(search);
                        match summoned {
                            Summoned::Request(acquired) => searching = serve(acquired, || endpoint.search(group)),
                            Summoned::Posts(session, slot) => posts.take(&session, slot),
                        }
                    }
                }));
            }
        }
        Self { endpoint, posts, socket: socket.to_owned(), stop, ending, threads: handles }
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub fn connect(&self) -> Connection {
        connect(&self.socket)
    }
}

impl Drop for EchoService {
    fn drop(&mut self) {
        self.stop.stop();
        self.ending.0.store(true, Ordering::Release);
        self.ending.1.store(1, Ordering::Release);
        for group in 0..self.endpoint.groups().count() {
            self.endpoint.wake_all(group);
        }
        for thread in self.threads.drain(..) {
            thread.join().expect("service thread");
        }
    }
}

pub fn connect(socket: &Path) -> Connection {
    let path = CString::new(socket.as_os_str().as_bytes()).expect("no NUL");
    let start = Instant::now();
    loop {
        match Connection::open(&path) {
            Ok(connection) => return connection,
            Err(error) if start.elapsed() > Duration::from_secs(10) => panic!("no session: {error}"),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

pub fn echo(value: u64, length: usize) -> Request {
    Request {
        operation: Operation::Echo as u32,
        offset: value,
        path_length: u32::try_from(length).expect("small"),
        ..Request::default()
    }
}

pub fn assert_echo(connection: &Connection, value: u64, data: &[u8]) {
    let mut back = vec![0; data.len()];
    let (first, second) = data.split_at(data.len() / 3);
    let reply = connection.call(&echo(value, data.len()), &[first, second], &mut back).expect("reply");
    assert_eq!((reply.status, reply.value), (wire::Status::Done as u32, value));
    back.reverse();
    assert_eq!(back, data);
}
