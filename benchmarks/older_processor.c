/* Hides from a process what processors without AVX-512, VNNI and AMX lack: a library to preload.

   The instruction CPUID raises a signal (Linux, "cpuid_fault" in /proc/cpuinfo). Its handler answers
   as the processor does, without these features. `processors.py` compiles it. */

#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012
#define BIT(n) (1u << (n))

/* Leaf 7: AVX-512 and its extensions in EBX, ECX and EDX, AMX in EDX; its second page: AVX-VNNI. */
static const uint32_t HIDDEN_EBX = BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31);
static const uint32_t HIDDEN_ECX = BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14);
static const uint32_t HIDDEN_EDX = BIT(2) | BIT(3) | BIT(8) | BIT(22) | BIT(23) | BIT(24) | BIT(25);
static const uint32_t HIDDEN_EAX_OF_PAGE_1 = BIT(4) | BIT(5) | BIT(21) | BIT(23);
static const uint32_t HIDDEN_EDX_OF_PAGE_1 = BIT(4) | BIT(5) | BIT(10) | BIT(19);

static struct sigaction previous;

static void allow_cpuid(int allowed) {
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, allowed);
}

static void answer(int signal_number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *instruction = (const uint8_t *)registers[REG_RIP];
    if (instruction[0] != 0x0f || instruction[1] != 0xa2) {
        sigaction(SIGSEGV, &previous, 0); /* another fault: it happens again, without this handler */
        return;
    }
    uint32_t leaf = registers[REG_RAX], page = registers[REG_RCX];
    uint32_t eax = leaf, ebx, ecx = page, edx;
    allow_cpuid(1);
    __asm__ volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    allow_cpuid(0);
    if (leaf == 7 && page == 0) {
        ebx &= ~HIDDEN_EBX;
        ecx &= ~HIDDEN_ECX;
        edx &= ~HIDDEN_EDX;
    }
    if (leaf == 7 && page == 1) {
        eax &= ~HIDDEN_EAX_OF_PAGE_1;
        edx &= ~HIDDEN_EDX_OF_PAGE_1;
    }
    registers[REG_RAX] = eax;
    registers[REG_RBX] = ebx;
    registers[REG_RCX] = ecx;
    registers[REG_RDX] = edx;
    registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void start(void) {
    struct sigaction action = {0};
    action.sa_sigaction = answer;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &previous);
    allow_cpuid(0);
}
