//! Runs a target without libFuzzer: over a corpus, then over mutations of it, for as long as asked.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Longest input that mutation makes.
const INPUT_MAX: usize = 16 << 10;

/// A small generator of pseudo-random numbers (xorshift): the same seed gives the same inputs.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

fn mutate(numbers: &mut Numbers, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut input = corpus[numbers.below(corpus.len())].clone();
    for _ in 0..=numbers.below(8) {
        let at = numbers.below(input.len());
        match numbers.below(6) {
            0 if !input.is_empty() => input[at] = numbers.next() as u8,
            1 if !input.is_empty() => input[at] ^= 1 << numbers.below(8),
            2 => {
                let other = &corpus[numbers.below(corpus.len())];
                input.extend_from_slice(&other[numbers.below(other.len())..]);
            }
            3 => input.truncate(at),
            4 => {
                let count = numbers.below(64);
                let bytes = std::iter::repeat_with(|| numbers.next() as u8).take(count).collect::<Vec<_>>();
                input.splice(at..at, bytes);
            }
            _ => input.extend_from_slice(&numbers.next().to_le_bytes()),
        }
    }
    input.truncate(INPUT_MAX);
    input
}

fn corpus(folder: &Path) -> std::io::Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut files: Vec<PathBuf> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    files.sort();
    files.into_iter().map(|path| Ok((path.clone(), fs::read(path)?))).collect()
}

/// The input under way, in a file: it is there also when the process ends in a way that nothing in it can catch.
struct UnderWay {
    path: PathBuf,
    file: File,
}

impl UnderWay {
    fn new(seed: u64) -> std::io::Result<Self> {
        let path = PathBuf::from(format!("crash-{seed}"));
        Ok(Self { file: File::create(&path)?, path })
    }

    /// The file stays the same one: to make it anew each time would have it written to the disk.
    fn put(&self, input: &[u8]) -> std::io::Result<()> {
        self.file.write_all_at(input, 0)?;
        self.file.set_len(input.len() as u64)
    }

    fn end(self) -> std::io::Result<()> {
        fs::remove_file(self.path)
    }
}

/// `PROGRAM CORPUS [SECONDS [SEED]]`: runs `target` over the corpus (a folder, or one file to repeat a failure), then over
/// mutations. The input that fails stays in `crash-SEED` in the working directory.
pub fn run(target: impl Fn(&[u8])) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(folder) = arguments.first().map(PathBuf::from) else {
        eprintln!("usage: PROGRAM CORPUS [SECONDS [SEED]]");
        return ExitCode::from(2);
    };
    let number = |index: usize, default: u64| match arguments.get(index) {
        Some(text) => text.parse().ok(),
        None => Some(default),
    };
    let (Some(seconds), Some(seed)) = (number(1, 0), number(2, 1)) else {
        eprintln!("SECONDS and SEED are numbers");
        return ExitCode::from(2);
    };
    if folder.is_file() {
        target(&fs::read(&folder).expect("readable"));
        return ExitCode::SUCCESS;
    }
    let inputs = match corpus(&folder) {
        Ok(inputs) if !inputs.is_empty() => inputs,
        Ok(_) => {
            eprintln!("{}: no inputs", folder.display());
            return ExitCode::from(2);
        }
        Err(error) => {
            eprintln!("{}: {error}", folder.display());
            return ExitCode::from(2);
        }
    };
    let under_way = UnderWay::new(seed).expect("writable");
    for (path, input) in &inputs {
        println!("{}", path.display());
        under_way.put(input).expect("writable");
        target(input);
    }
    let inputs: Vec<Vec<u8>> = inputs.into_iter().map(|(_, input)| input).collect();
    let mut numbers = Numbers(seed.max(1));
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut rounds = 0u64;
    while Instant::now() < end {
        let input = mutate(&mut numbers, &inputs);
        under_way.put(&input).expect("writable");
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| target(&input))).is_err() {
            eprintln!("failed after {rounds} mutations; the input is in {}", under_way.path.display());
            return ExitCode::FAILURE;
        }
        rounds += 1;
    }
    under_way.end().expect("removable");
    let count = inputs.len() as u64;
    println!("soak: {} executions ({count} inputs, {rounds} mutations), seed {seed}: no failure", count + rounds);
    ExitCode::SUCCESS
}
