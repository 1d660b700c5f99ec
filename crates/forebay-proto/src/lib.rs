//! What programs and the accelerator service say to each other.
//!
//! - [`wire`]: the messages, and how they are encoded. Everything that is serialised is here.
//! - [`socket`]: packets with file descriptors over a local socket.
//! - [`page`]: the layouts of the shared pages: load for everybody, shares and credit for one program, and what a program
//!   says of itself.
//! - [`bell`]: how programs sleep until the service has something new to say.
//! - [`memory`]: shared memory that cannot be resized, and that only one side can write.
//! - [`client`]: the program's side: a connection, requests, and an [`client::Account`] to ask before work is begun.
//!
//! **The protocol**
//! 1. A program connects to the service's socket ([`socket_paths`]) and says [`wire::Request::Hello`] first. The service
//!    answers each request with one [`wire::Reply`], in order, and never says anything unasked.
//! 2. The answer to `Hello` brings three files: the global page and the program's private page, which the program can map
//!    for reading only, and its own page, which it may write.
//! 3. Who a program is the kernel says (peer credentials), not the program.
//! 4. A message that is not understood, or comes in the wrong order, ends the connection; a request that is refused does
//!    not.
//! 5. A connection that ends gives its credit accounts back. The class of a process lasts until the process ends.
//! 6. Without a service, and once it has gone, programs run unrestricted; they look for it again from time to time.

// A panic here would be the end of somebody else's process.
#![cfg_attr(
    not(any(test, loom)),
    deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)
)]

pub mod bell;
#[cfg(not(all(loom, test)))]
pub mod client;
pub mod memory;
pub mod page;
mod seqlock;
pub mod socket;
mod sync;
pub mod wire;

use std::path::PathBuf;

/// Environment variable that names the service's socket.
pub const SOCKET_VARIABLE: &str = "FOREBAY_SOCKET";
/// The socket of a service that serves the whole machine.
pub const SYSTEM_SOCKET: &str = "/run/forebay/socket";

/// Where a service's socket may be, best first: what [`SOCKET_VARIABLE`] says and nothing else; or the system's, or the
/// user's own.
pub fn socket_paths() -> Vec<PathBuf> {
    if let Some(named) = std::env::var_os(SOCKET_VARIABLE) {
        return if named.is_empty() { Vec::new() } else { vec![named.into()] };
    }
    vec![PathBuf::from(SYSTEM_SOCKET), user_socket()]
}

/// The socket of a service that a user runs without privileges: in the user's run-time folder, or, where a login has made
/// none (in containers), in one of the user's own among temporary files (so it goes by `TMPDIR`). That one somebody else may
/// have made: whoever serves there looks whose it is first, and whoever connects ([`client::Connection::open_at`]) whose the
/// socket is.
pub fn user_socket() -> PathBuf {
    let user = rustix::process::geteuid().as_raw();
    let logged_in = || Some(PathBuf::from(format!("/run/user/{user}"))).filter(|d| d.is_dir());
    let named = std::env::var_os("XDG_RUNTIME_DIR").filter(|d| !d.is_empty()).map(PathBuf::from);
    match named.or_else(logged_in) {
        Some(dir) => dir.join("forebay/socket"),
        None => std::env::temp_dir().join(format!("forebay-{user}/socket")),
    }
}
