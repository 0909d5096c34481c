//! Descriptors sent with a command: those of an instance's branches, in the order of [`StackSpec`](crate::StackSpec).

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{self, BufRead, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Most descriptors that go with a command.
pub const DESCRIPTORS_MAX: usize = crate::LOWERS_MAX + 1;

/// Sends a line, and descriptors with its first byte.
///
/// # Errors
/// Those of the connection; `InvalidInput` for too many descriptors.
pub fn send(mut stream: &UnixStream, line: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    if descriptors.is_empty() {
        return stream.write_all(line);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if descriptors.len() > DESCRIPTORS_MAX || !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let sent = rustix::io::retry_on_intr(|| sendmsg(stream, &[IoSlice::new(line)], &mut control, SendFlags::NOSIGNAL))?;
    stream.write_all(&line[sent..])
}

/// The lines of a connection, each with the descriptors that came with it. What arrives is bounded; whatever is not taken is closed.
pub struct Receiver {
    input: BufReader<Incoming>,
    /// Bytes of the lines that were taken.
    taken: u64,
}

impl Receiver {
    /// Reads this connection.
    #[must_use]
    pub fn new(stream: UnixStream) -> Self {
        Self { input: BufReader::new(Incoming { stream, read: 0, descriptors: Vec::new(), failed: None }), taken: 0 }
    }

    /// The next line, with its end, and its descriptors; an empty one at the end of the connection. What is longer than `bytes_max` comes cut off
    /// there.
    ///
    /// # Errors
    /// Those of the connection; `InvalidData` for more than [`DESCRIPTORS_MAX`] descriptors, or when not all could be received. That is so of lines
    /// that were read together: those after them come with their own.
    pub fn line(&mut self, bytes_max: u64) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        let mut line = Vec::new();
        self.taken += self.input.by_ref().take(bytes_max).read_until(b'\n', &mut line)? as u64;
        let incoming = self.input.get_mut();
        let own = incoming.descriptors.partition_point(|(at, _)| *at <= self.taken);
        let own = incoming.descriptors.drain(..own).map(|(_, descriptor)| descriptor).collect();
        let Some((at, cause)) = incoming.failed else { return Ok((line, own)) };
        // Those that were lost may be of any line up to there.
        if at <= self.taken {
            incoming.failed = None;
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, cause))
    }
}

/// The bytes of a connection, and the descriptors that were read with them.
struct Incoming {
    stream: UnixStream,
    /// Bytes that were read.
    read: u64,
    /// Each with how many bytes had been read then. One call may read the end of a message before the one with the descriptors, but ends
    /// in that one, and so in the line that they came with.
    descriptors: Vec<(u64, OwnedFd)>,
    /// Why descriptors were lost, and how many bytes had been read then.
    failed: Option<(u64, &'static str)>,
}

impl Read for Incoming {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(&self.stream, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        self.read += got.bytes as u64;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors.map(|descriptor| (self.read, descriptor)));
            }
        }
        let is_cut = got.flags.contains(ReturnFlags::CTRUNC);
        if is_cut || self.descriptors.len() > DESCRIPTORS_MAX {
            self.descriptors.clear();
            let cause = if is_cut {
                "not all descriptors of a command could be received: they are too many, or too many files are open"
            } else {
                "too many descriptors came with a command"
            };
            self.failed = Some((self.read, cause));
        }
        Ok(got.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn texts(input: &mut Receiver, count: usize) -> Vec<(String, usize)> {
        let line =
            |(line, descriptors): (Vec<u8>, Vec<OwnedFd>)| (String::from_utf8(line).expect("text"), descriptors.len());
        (0..count).map(|_| line(input.line(1 << 20).expect("read"))).collect()
    }

    #[test]
    fn descriptors_come_with_their_line_however_lines_are_read() {
        let (here, there) = UnixStream::pair().expect("sockets");
        let file = tempfile::tempfile().expect("a file");
        let long = "x".repeat(20_000) + "\n";
        send(&here, b"one\n", &[]).expect("sent");
        send(&here, b"two\n", &[file.as_fd(), here.as_fd()]).expect("sent");
        send(&here, b"three\n", &[]).expect("sent");
        send(&here, long.as_bytes(), &[file.as_fd()]).expect("sent");
        send(&here, b"five\n", &[file.as_fd()]).expect("sent");
        drop(here);
        let lines = [("one\n", 0), ("two\n", 2), ("three\n", 0), (long.as_str(), 1), ("five\n", 1), ("", 0)];
        let got = texts(&mut Receiver::new(there), lines.len());
        assert_eq!(got, lines.map(|(line, count)| (line.to_owned(), count)));
    }

    #[test]
    fn more_descriptors_than_a_command_has_are_refused_and_closed() {
        let (here, there) = UnixStream::pair().expect("sockets");
        let (file, reader) = UnixStream::pair().expect("sockets");
        let many = vec![file.as_fd(); DESCRIPTORS_MAX + 1];
        assert_eq!(send(&here, b"x\n", &many).map_err(|error| error.kind()), Err(io::ErrorKind::InvalidInput));
        // One line, in two messages.
        send(&here, b"x", &many[1..]).expect("sent");
        send(&here, b"y\n", &many[1..]).expect("sent");
        let other = tempfile::tempfile().expect("a file");
        send(&here, b"z\n", &[other.as_fd()]).expect("sent");
        let mut input = Receiver::new(there);
        assert_eq!(input.line(100).map_err(|error| error.kind()).err(), Some(io::ErrorKind::InvalidData));
        assert_eq!(texts(&mut input, 1), [("z\n".to_owned(), 1)]);
        drop(file);
        let mut rest = Vec::new();
        assert_eq!((&reader).read_to_end(&mut rest).expect("all others are closed"), 0);
    }
}
