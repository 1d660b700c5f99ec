//! The program's side, beside a service that is slow, or has stopped altogether.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forebay_proto::client::{Connection, Error, PATIENCE, Session};
use forebay_proto::memory::Made;
use forebay_proto::page::{ClientPage, GlobalPage, ProgramPage};
use forebay_proto::socket;
use forebay_proto::wire::{self, MAX_REPLY, Reply, Request};
use rustix::net::{SocketAddrUnix, SocketFlags, accept, bind, listen};

/// A folder of its own, which goes with it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let dir = std::env::temp_dir().join(format!("forebay-slow-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Folder(dir)
    }

    fn listens(&self, backlog: i32) -> (OwnedFd, PathBuf) {
        let path = self.0.join("socket");
        let s = socket::new(SocketFlags::empty()).unwrap();
        bind(&s, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&s, backlog).unwrap();
        (s, path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// One that was stopped takes no more connections once there are as many as may wait.
#[test]
fn a_service_that_takes_no_connections_is_not_waited_for() {
    let folder = Folder::new("full");
    let (_listens, path) = folder.listens(0);
    let connects = |_| {
        let path = path.clone();
        std::thread::spawn(move || {
            let begun = Instant::now();
            (Connection::open_at(&path, "test").map(drop), begun.elapsed())
        })
    };
    let all: Vec<_> = (0..4).map(connects).collect();
    for one in all {
        let begun = Instant::now();
        while !one.is_finished() {
            assert!(begun.elapsed() < 4 * PATIENCE, "it waits still");
            std::thread::sleep(Duration::from_millis(10));
        }
        let (came, took) = one.join().unwrap();
        assert!(matches!(came, Err(Error::Io { .. })), "{came:?}");
        assert!(took < 3 * PATIENCE, "{took:?}");
    }
}

/// The devices that each connection has joined, in order.
type Joined = Arc<Mutex<Vec<Vec<String>>>>;

/// Serves connections until one says a name of `ends`. The very first join is answered too late.
fn serve(listens: &OwnedFd, joined: &Joined) {
    let pages = (
        Made::<GlobalPage>::new("global", false).unwrap(),
        Made::<ClientPage>::new("client", false).unwrap(),
        Made::<ProgramPage>::new("program", true).unwrap(),
    );
    let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    let mut late = true;
    std::thread::scope(|s| {
        while let Ok(client) = accept(listens) {
            let mut buffer = vec![0; MAX_REPLY];
            let mut hear = || {
                let (n, _) = socket::receive(client.as_fd(), &mut buffer, true).ok().filter(|(n, _)| *n > 0)?;
                wire::decode::<Request>(&buffer[..n], MAX_REPLY).ok()
            };
            match hear() {
                Some(Request::Hello { name, .. }) if name != "end" => {}
                _ => return,
            }
            let files = [pages.0.file(), pages.1.file(), pages.2.file(), bell.as_fd()];
            let welcome = Reply::Welcome { service: "test".into(), up_ms: 0 };
            socket::send(client.as_fd(), &wire::encode(&welcome), &files, true).unwrap();
            let number = joined.lock().unwrap().len();
            joined.lock().unwrap().push(Vec::new());
            let late = std::mem::take(&mut late);
            s.spawn(move || {
                let mut buffer = vec![0; MAX_REPLY];
                let mut slow = late;
                while let Ok((n, _)) = socket::receive(client.as_fd(), &mut buffer, true)
                    && n > 0
                {
                    let Ok(Request::Join { device }) = wire::decode::<Request>(&buffer[..n], MAX_REPLY) else { return };
                    let account = {
                        let mut all = joined.lock().unwrap();
                        all[number].push(device);
                        (all[number].len() - 1) as u8
                    };
                    if std::mem::take(&mut slow) {
                        std::thread::sleep(PATIENCE + Duration::from_millis(300));
                    }
                    let reply = Reply::Joined { account, metered: false };
                    let _ = socket::send(client.as_fd(), &wire::encode(&reply), &[], true);
                }
            });
        }
    });
}

#[test]
fn an_answer_that_comes_too_late_is_taken_for_no_other() {
    let folder = Folder::new("late");
    let (listens, path) = folder.listens(8);
    let joined = Joined::default();
    let service = {
        let joined = joined.clone();
        std::thread::spawn(move || serve(&listens, &joined))
    };
    let session = Session::open_at(vec![path.clone()], "test").unwrap();
    let late = session.join("one").map(drop);
    assert!(matches!(late, Err(Error::Io { .. })), "{late:?}");
    // By now the answer has come.
    std::thread::sleep(Duration::from_millis(600));
    let begun = Instant::now();
    let two = loop {
        match session.join("two") {
            Ok(account) => break account,
            Err(e) => assert!(begun.elapsed() < Duration::from_secs(20), "{e}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let three = session.join("three").unwrap();
    // At the service, too, these are the accounts of the connection that there is now.
    assert_eq!(joined.lock().unwrap().last().unwrap(), &["two", "three"]);
    assert!(session.is_served());
    drop((two, three, session));
    assert!(Connection::open_at(&path, "end").is_err());
    service.join().unwrap();
}
