// Stub of the runtime: the emulator in emu.h provides it all.
#pragma once
