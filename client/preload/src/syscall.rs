//! libc's `syscall`: the library examines the call first, answers a few itself, and has the kernel make the others as asked.

use poolfs_client::{errno, rights};

/// What the look at a system call says, in the two registers such a structure returns in.
#[repr(C)]
struct Looked {
    /// Not 0: `result` is the answer, and the kernel is not to be asked.
    answered: usize,
    result: isize,
}

extern "C" fn look(number: usize, a: usize, b: usize, c: usize) -> Looked {
    let answer = u32::try_from(number).ok().and_then(|number| rights::before_system_call(number, [a, b, c]));
    match answer {
        Some(result) => Looked { answered: 1, result },
        None => Looked { answered: 0, result: 0 },
    }
}

extern "C" fn set_errno(errno: i32) {
    errno::set(errno);
}

/// In assembly, because a system call may return on another stack, or twice.
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn syscall() {
    core::arch::naked_asm!(
        "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
        "call {look}",
        "test rax, rax",
        "jnz 3f",
        "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
        "mov rax, rdi",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "mov rdx, rcx",
        "mov r10, r8",
        "mov r8, r9",
        "mov r9, [rsp + 8]",
        "syscall",
        "4:",
        "cmp rax, -4095",
        "jae 2f",
        "ret",
        "2:",
        "neg eax",
        "mov edi, eax",
        "push rax",
        "call {set_errno}",
        "pop rax",
        "mov rax, -1",
        "ret",
        "3:",
        "mov rax, rdx",
        "add rsp, 56",
        "jmp 4b",
        look = sym look,
        set_errno = sym set_errno,
    )
}
