# Builds the extension as a project of its own while this one is configured, so that whatever goes wrong there
# becomes a text next to the Python sources instead of a failed install. AFM_MLX_REQUIRE_NATIVE=1 in the
# environment makes it fail.

set(native_source ${CMAKE_CURRENT_LIST_DIR})
set(native_build ${CMAKE_BINARY_DIR}/native)
set(native_library "")
set(native_reason "")

# Runs a step; what it printed goes to ${native_build}/log.txt, its errors, or else its last lines, to `reason`.
function(native_step what reason)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  file(APPEND ${native_build}/log.txt "${output}\n")
  set(text "")
  if(NOT status EQUAL 0)
    string(REGEX MATCH "[^\n]*(fatal error|error:|Error at)[^\n]*(\n[^\n]*)?(\n[^\n]*)?(\n[^\n]*)?" first "${output}")
    if(NOT first)
      string(LENGTH "${output}" length)
      set(start 0)
      if(length GREATER 600)
        math(EXPR start "${length} - 600")
      endif()
      string(SUBSTRING "${output}" ${start} -1 first)
    endif()
    string(REGEX REPLACE "[ \t\r\n]+" " " first "${first}")
    string(STRIP "${first}" first)
    if(first STREQUAL "")
      set(first "it printed nothing, and ended with ${status}")  # a number, or the name of a signal
    endif()
    set(text "${what}: ${first}")
  endif()
  set(${reason} "${text}" PARENT_SCOPE)
endfunction()

file(MAKE_DIRECTORY ${native_build})
file(WRITE ${native_build}/log.txt "")
# What an earlier build found may be gone: pip's build environments live as long as one build.
file(REMOVE_RECURSE ${native_build}/CMakeCache.txt ${native_build}/out)
find_package(Python 3.11 QUIET COMPONENTS Interpreter)
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  set(native_reason "there was no C++ compiler when afm-mlx was installed")
else()
  native_step("CMake could not prepare the build" native_reason
    ${CMAKE_COMMAND} -S ${native_source} -B ${native_build} -G ${CMAKE_GENERATOR}
    -DCMAKE_TOOLCHAIN_FILE=${CMAKE_TOOLCHAIN_FILE}
    -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=${Python_EXECUTABLE}
    -DCMAKE_MAKE_PROGRAM=${CMAKE_MAKE_PROGRAM} -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}
    -DCMAKE_OSX_ARCHITECTURES=${CMAKE_OSX_ARCHITECTURES} -DCMAKE_OSX_DEPLOYMENT_TARGET=${CMAKE_OSX_DEPLOYMENT_TARGET})
  if(NOT native_reason)
    cmake_host_system_information(RESULT native_jobs QUERY NUMBER_OF_LOGICAL_CORES)
    native_step("it did not compile" native_reason
      ${CMAKE_COMMAND} --build ${native_build} --config Release --parallel ${native_jobs})
  endif()
  file(GLOB native_library ${native_build}/out/_afm_cpu*)
  if(NOT native_reason)
    native_step("it does not work here" native_reason
      ${Python_EXECUTABLE} ${native_source}/trial.py ${native_library})
  endif()
endif()

# Read by extension.py; empty when the library is there.
file(WRITE ${CMAKE_BINARY_DIR}/native_reason.txt "${native_reason}")
install(FILES ${CMAKE_BINARY_DIR}/native_reason.txt DESTINATION afm_mlx/kernels/cpu)
if(NOT native_reason)
  install(FILES ${native_library} DESTINATION afm_mlx/kernels/cpu)
elseif("$ENV{AFM_MLX_REQUIRE_NATIVE}" STREQUAL "1")
  message(FATAL_ERROR "The CPU kernels could not be built: ${native_reason}. All of the build's output: "
                      "${native_build}/log.txt")
else()
  set(native_warning "The CPU kernels could not be built, and afm-mlx will be slow on the CPU: ${native_reason}. "
                     "All of the build's output: ${native_build}/log.txt")
  string(CONCAT native_warning ${native_warning})
  message(WARNING "${native_warning}")
  # pip and uv show nothing of a build that ends well: the line goes to the terminal itself, where there is one.
  set(native_show "import sys; print('\\nafm-mlx:', sys.argv[1], file=open('/dev/tty', 'w'))")
  execute_process(COMMAND ${Python_EXECUTABLE} -c "${native_show}" "${native_warning}" OUTPUT_QUIET ERROR_QUIET)
endif()
